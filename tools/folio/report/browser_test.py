#!/usr/bin/env python3
"""The page of `folio report` in a headless Chromium: browser_test.py PROGRAM TRACES [--keep DIR]

Makes results, the page of them, and looks at what the browser made of it: every chart drawn, with its axes and marks, in light
and in dark, without an error and without a request to any network. --keep leaves the page and pictures of it there.
Exit code 77, which ctest takes for skipped, where there is no Chromium (scripts/install_deps.sh report).
"""

import argparse
import html.parser
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

CHARTS = {"replay": 4, "steps of a replay": 6, "bench": 1, "ranks": 2, "peers": 2}
AXES = ["share that waited no longer", "requests", "ms a step", "pages", "share of tokens", "KV tokens",
        "time on the replay's clock, s", "arithmetic intensity, FLOP per byte of keys and values", "GFLOP/s", "TFLOP/s",
        "speedup = t_peer / t_folio", "ranks", "ms a layer", "speedup over one rank"]
LEGENDS = ["decoding", "prefilling", "waiting", "held", "cached", "run", "plan", "flashinfer_fa2", "decode", "prefill",
           "simulated: simulated", "simulated: without the links' time", "measured: measured", "decode 2 x 1 over 256"]


def find_browser():
    names = [os.environ.get("FOLIO_CHROMIUM", ""), "chromium", "chromium-browser", "google-chrome", "google-chrome-stable"]
    return next((found for name in names if name and (found := shutil.which(name))), None)


def peers_results():
    """As bench/peers writes them, on a GPU."""
    results = []
    for row, size, flops in (("decode 64x4096", 1.07e9, 2.1e9), ("prefill 8x4096", 1.3e8, 1.1e12)):
        least = max(size / 4.3e12, flops / 6.5e14) * 1e6
        us = {"folio": [least * f for f in (1.20, 1.21, 1.22)], "flashinfer_fa2": [least * f for f in (1.4, 1.5, 1.3)],
              "read": [size / 4.3e6] * 3, "gemm": [flops / 7e8] * 3}
        results.append({"row": row, "us": us, "said": {name: {"bytes": size, "flops": flops} for name in us}, "without": {}})
    return {"device": "cuda", "clock": "wall", "threads": 16, "results": results}


def measured_ranks(simulated):
    """As folio bench --ranks writes it of GPUs: the same cases as a simulated file's."""
    cases = []
    for one in simulated["cases"]:
        case = {key: one[key] for key in ("ranks", "batch", "q_len", "kv_len", "kernel", "one_rank_s", "layer_s", "efficiency")}
        cases.append({**case, "over_peer_memory": True})
    return {"device": "cuda", "threads": 132, "simulated": False, "graph": True, "pcp": False, "transport": "peer", "dcp_comm": "a2a",
            "rounds": 2, "cases": cases}


def make_page(program, traces, folder):
    def folio(*arguments):
        subprocess.run([program, *map(str, arguments)], check=True, stdout=subprocess.DEVNULL)

    small = ("--num-q-heads", 2, "--num-kv-heads", 1, "--head-dim", 16, "--threads", 2, "-q")
    folio("replay", traces / "mooncake_excerpt.jsonl", *small, "--requests", 60, "--clock", "measured", "--request-rate", 50,
          "--json", folder / "chat.json")
    folio("replay", traces / "azure_excerpt.csv", *small, "--requests", 40, "--json", folder / "code.json")
    folio("bench", "--model", "tiny", "--batch", "1,4", "--kv-len", "64,256", "--q-len", 16, "--kernel", "generic", "--rounds", 2,
          "--min-ms", 0.2, "-q", "--json", folder / "bench.json")
    folio("bench", "--model", "tiny", "--sweep", "decode", "--num-q-heads", 8, "--num-kv-heads", 1, "--batch", "1,2", "--kv-len", 256,
          "--ranks", "2,4", "--simulate", "--kernel", "generic", "--rounds", 2, "--min-ms", 0.2, "-q", "--json", folder / "simulated.json")
    (folder / "measured.json").write_text(json.dumps(measured_ranks(json.loads((folder / "simulated.json").read_text()))))
    (folder / "peers.json").write_text(json.dumps(peers_results()))
    page = folder / "page.html"
    folio("report", *(folder / f"{name}.json" for name in ("chat", "code", "bench", "simulated", "measured", "peers")), "-o", page)
    return page


class Browser:
    def __init__(self, program, folder):
        self.program, self.folder = program, folder

    def run(self, page, *arguments, dark=False):
        command = [self.program, "--headless=new", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={self.folder}/profile",
                   "--window-size=1280,5600", "--virtual-time-budget=30000", "--enable-logging=stderr",
                   "--host-resolver-rules=MAP * ~NOTFOUND", f"--blink-settings=preferredColorScheme={0 if dark else 1}",
                   *arguments, page.as_uri()]
        if os.geteuid() == 0:
            command.insert(1, "--no-sandbox")
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=240)


class Drawn(html.parser.HTMLParser):
    """What stands in the page after its script ran."""

    def __init__(self):
        super().__init__()
        self.state, self.svgs, self.marks, self.texts, self._path = None, 0, [], [], []

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        if tag == "html":
            self.state = attributes.get("data-state")
        if tag == "svg" and "marks" in (attributes.get("class") or ""):
            self.svgs += 1
            self.marks.append(0)
        if tag == "path" and self.marks and attributes.get("aria-roledescription", "") in ("line mark", "area mark", "point",
                                                                                           "rule mark", "rule"):
            self.marks[-1] += 1
        self._path.append(tag)

    def handle_data(self, data):
        if self._path and self._path[-1] == "text":
            self.texts.append(data)

    def handle_endtag(self, tag):
        while self._path and self._path.pop() != tag:
            pass


def check(condition, what):
    if not condition:
        sys.exit(f"browser_test: {what}")


def check_page(browser, page, dark):
    result = browser.run(page, "--dump-dom", dark=dark)
    complaints = [line for line in result.stderr.splitlines() if "CONSOLE" in line]
    check(not complaints, "the console has " + "\n".join(complaints))
    drawn = Drawn()
    drawn.feed(result.stdout)
    check(drawn.state == "drawn", f"the page's state is {drawn.state!r}")
    wanted = CHARTS["replay"] + 2 * CHARTS["steps of a replay"] + CHARTS["bench"] + CHARTS["ranks"] + CHARTS["peers"]
    check(drawn.svgs == wanted, f"{drawn.svgs} charts are drawn, {wanted} wanted")
    check(all(marks > 0 for marks in drawn.marks), f"a chart has no marks: {drawn.marks}")
    for text in (*AXES, *LEGENDS):
        check(text in drawn.texts, f"no chart says {text!r}")
    check(not any("NaN" in text or "Infinity" in text or text == "undefined" for text in drawn.texts), "a text is no number")
    check(re.search(r"TTFT p50</th>", result.stdout), "there is no table of latencies")
    return drawn


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", type=pathlib.Path)
    parser.add_argument("traces", type=pathlib.Path)
    parser.add_argument("--keep", type=pathlib.Path)
    options = parser.parse_args()
    program = find_browser()
    if program is None:
        print("browser_test: skipped: no Chromium here; scripts/install_deps.sh report installs Debian's")
        sys.exit(77)
    with tempfile.TemporaryDirectory() as folder:
        folder = options.keep.resolve() if options.keep else pathlib.Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        page = make_page(options.program.resolve(), options.traces.resolve(), folder)
        browser = Browser(program, folder)
        for dark in (False, True):
            drawn = check_page(browser, page, dark)
            picture = folder / ("dark.png" if dark else "light.png")
            browser.run(page, f"--screenshot={picture}", dark=dark)
            check(picture.stat().st_size > 100_000, f"{picture} is nearly empty")
            print(f"{'dark' if dark else 'light'}: {drawn.svgs} charts, {sum(drawn.marks)} marks")


if __name__ == "__main__":
    main()
