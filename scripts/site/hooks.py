"""What the site's pages need beyond what they are on their own (mkdocs.yml names this file).

Pages are written as a repository shows them. Three things differ on the site: links to files outside of docs/ become
their text, what is nested in lists is indented by four columns, and warnings of Doxygen end the build.
"""

import pathlib
import posixpath
import re

ROOT = pathlib.Path(__file__).resolve().parents[2]
DOXYGEN_LOG = ROOT / "build" / "doxygen.log"  # mkdocs.yml names it too
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)#:\s]+)(#[^)\s]*)?\)")
ITEM = re.compile(r"(?:[-*]|\d+\.) ")
NESTED = re.compile(r"^ {2,3}(?=\S)")
NESTED_ITEM = re.compile(r"^ {2,3}(?=(?:[-*]|\d+\.) |\|)")


def without_outer_links(markdown, page):
    """The text with links that leave docs/ replaced by what they say; `page` is the page's path below docs/."""
    folder = posixpath.dirname(page)

    def inner(link):
        target = posixpath.normpath(posixpath.join(folder, link[2]))
        return link[1] if target.startswith("..") else link[0]

    return LINK.sub(inner, markdown)


def indented(markdown):
    """Lists as Python's Markdown takes them: what is nested by four columns, and an empty line before a list."""
    lines, fenced, loose, before = [], False, False, ""
    for line in markdown.split("\n"):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        if not fenced and not line.startswith("```"):
            item = ITEM.match(line)
            if line.strip() and not line.startswith(" "):
                if item and before.strip() and (loose or not (before.startswith(" ") or ITEM.match(before))):
                    lines.append("")
                loose = False
            elif NESTED.match(line) and (loose or not before.strip() or NESTED_ITEM.match(line)):
                loose = loose or not before.strip()
                if NESTED_ITEM.match(line) and before.strip() and line.lstrip().startswith("|") and not before.lstrip().startswith("|"):
                    lines.append("")
                lines.append(NESTED.sub("    ", line))
                before = line
                continue
        lines.append(line)
        before = line
    return "\n".join(lines)


def on_pre_build(config):
    DOXYGEN_LOG.parent.mkdir(exist_ok=True)
    DOXYGEN_LOG.unlink(missing_ok=True)


def on_page_markdown(markdown, page, config, files):
    if page.file.src_uri.startswith("api/"):  # Doxygen's own
        return markdown
    return indented(without_outer_links(markdown, page.file.src_uri))


def on_post_build(config):
    """MkDoxy drops what Doxygen says, and a Doxygen that did not run: neither may pass."""
    from mkdocs.exceptions import PluginError  # here, so that tests need no MkDocs

    if not DOXYGEN_LOG.is_file():
        raise PluginError("Doxygen did not run: is it installed? (scripts/install_deps.sh docs)")
    warnings = DOXYGEN_LOG.read_text().strip()
    if warnings:
        raise PluginError(f"Doxygen warns:\n{warnings}")
