#!/usr/bin/env python3
"""Writes Vega, Vega-Lite and vega-embed as one script, and their licences: what `folio report` puts into its pages.

    vega_bundle.py SCRIPT LICENCES

They come out of the Python package vl-convert-python, which holds them; nothing is fetched.
"""

import importlib.metadata
import pathlib
import sys

import vl_convert

BSD3 = """\
Redistribution and use in source and binary forms, with or without modification, are permitted provided that the
following conditions are met:

1. Redistributions of source code must retain the above copyright notice, this list of conditions and the following
   disclaimer.
2. Redistributions in binary form must reproduce the above copyright notice, this list of conditions and the following
   disclaimer in the documentation and/or other materials provided with the distribution.
3. Neither the name of the copyright holder nor the names of its contributors may be used to endorse or promote products
   derived from this software without specific prior written permission.

THIS SOFTWARE IS PROVIDED BY THE COPYRIGHT HOLDERS AND CONTRIBUTORS "AS IS" AND ANY EXPRESS OR IMPLIED WARRANTIES,
INCLUDING, BUT NOT LIMITED TO, THE IMPLIED WARRANTIES OF MERCHANTABILITY AND FITNESS FOR A PARTICULAR PURPOSE ARE
DISCLAIMED. IN NO EVENT SHALL THE COPYRIGHT HOLDER OR CONTRIBUTORS BE LIABLE FOR ANY DIRECT, INDIRECT, INCIDENTAL, SPECIAL,
EXEMPLARY, OR CONSEQUENTIAL DAMAGES (INCLUDING, BUT NOT LIMITED TO, PROCUREMENT OF SUBSTITUTE GOODS OR SERVICES; LOSS OF
USE, DATA, OR PROFITS; OR BUSINESS INTERRUPTION) HOWEVER CAUSED AND ON ANY THEORY OF LIABILITY, WHETHER IN CONTRACT, STRICT
LIABILITY, OR TORT (INCLUDING NEGLIGENCE OR OTHERWISE) ARISING IN ANY WAY OUT OF THE USE OF THIS SOFTWARE, EVEN IF ADVISED
OF THE POSSIBILITY OF SUCH DAMAGE.
"""


def licences():
    newest = max(vl_convert.get_vegalite_versions(), key=lambda text: tuple(map(int, text.split("."))))
    package = importlib.metadata.version("vl-convert-python")
    return f"""\
Vega {vl_convert.get_vega_version()}, Vega-Lite {newest} and vega-embed {vl_convert.get_vega_embed_version()}, with the parts of
D3, TopoJSON and lodash that they use, bundled by vl-convert-python {package}.

Vega, Vega-Lite, vega-embed: Copyright (c) 2015-2026, University of Washington Interactive Data Lab, and other contributors.
BSD-3-Clause:

{BSD3}
D3 and TopoJSON: Copyright (c) 2010-2026, Mike Bostock. ISC: Permission to use, copy, modify, and/or distribute this software
for any purpose with or without fee is hereby granted, provided that the above copyright notice and this permission notice
appear in all copies. THE SOFTWARE IS PROVIDED "AS IS" AND THE AUTHOR DISCLAIMS ALL WARRANTIES WITH REGARD TO THIS SOFTWARE
INCLUDING ALL IMPLIED WARRANTIES OF MERCHANTABILITY AND FITNESS. IN NO EVENT SHALL THE AUTHOR BE LIABLE FOR ANY SPECIAL,
DIRECT, INDIRECT, OR CONSEQUENTIAL DAMAGES OR ANY DAMAGES WHATSOEVER RESULTING FROM LOSS OF USE, DATA OR PROFITS, WHETHER IN
AN ACTION OF CONTRACT, NEGLIGENCE OR OTHER TORTIOUS ACTION, ARISING OUT OF OR IN CONNECTION WITH THE USE OR PERFORMANCE OF
THIS SOFTWARE.

lodash: Copyright OpenJS Foundation and other contributors. MIT: the software is provided "as is", without warranty of any
kind; the notice stays with all copies or substantial portions of it.
"""


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    script, texts = map(pathlib.Path, sys.argv[1:])
    bundle = vl_convert.javascript_bundle()
    if "</script" in bundle.lower():
        sys.exit("the bundle would end the page's script element")
    script.write_text(bundle, encoding="utf-8")
    texts.write_text(licences(), encoding="utf-8")


if __name__ == "__main__":
    main()
