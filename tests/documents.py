"""PDF files of one page, written object by object, so that each holds one thing that renderers treat in their own ways."""

from __future__ import annotations

#: Boxes on a page of 300 by 200 points.
WIDE = "/Rect[20 100 220 130]"
TALL = "/Rect[20 60 220 130]"
SQUARE = "/Rect[20 100 50 130]"
_FIELD = "/Subtype/Widget/F 4"
_TEXT = f"{_FIELD}{WIDE}/FT/Tx/T(a)/V(Hello field)"
_BUTTON = f"{_FIELD}{SQUARE}/FT/Btn/T(a)"
_CHOICE = "/FT/Ch/T(a)/Opt[(One)(Hello field)]/V(Hello field)"
#: Appearances that pages below have as their objects 7 and 8.
_WORDS, _MARK = "/AP<</N 7 0 R>>", "/AP<</N<</Yes 8 0 R>>>>"
_BAR = "0 g 20 100 100 30 re f"


def pdf_of(*objects: str) -> bytes:
    """Write a PDF whose object 1 is its catalogue."""
    data, offsets = b"%PDF-1.7\n", []
    for number, body in enumerate(objects, 1):
        offsets.append(len(data))
        data += f"{number} 0 obj\n{body}\nendobj\n".encode("latin-1")
    start, size = len(data), len(objects) + 1
    entries = "".join(f"{offset:010d} 00000 n \n" for offset in offsets)
    tail = f"xref\n0 {size}\n0000000000 65535 f \n{entries}trailer <</Size {size}/Root 1 0 R>>\nstartxref\n{start}\n%%EOF\n"
    return data + tail.encode()


def stream(content: str, entries: str = "") -> str:
    return f"<<{entries}/Length {len(content)}>>\nstream\n{content}\nendstream"


def page(
    annotation: str = "",
    *,
    content: str = "",
    entries: str = "",
    resources: str = "",
    catalogue: str = "",
    form: str | None = None,
    further: str = "<<>>",
) -> bytes:
    """Write a page with one annotation; ``form`` are entries of the document's form, ``further`` is object 9."""
    fields = (
        ""
        if form is None
        else f"/AcroForm<</Fields[6 0 R]/DR<</Font<</Helv 5 0 R>>>>/DA(/Helv 18 Tf 0 g){form}>>"
    )
    annotations = "/Annots[6 0 R]" if annotation else ""
    words = "BT /Helv 18 Tf 2 8 Td (Hello field) Tj ET"
    drawn = (
        "/Type/XObject/Subtype/Form/BBox[0 0 200 30]/Resources<</Font<</Helv 5 0 R>>>>"
    )
    return pdf_of(
        f"<</Type/Catalog/Pages 2 0 R{fields}{catalogue}>>",
        "<</Type/Pages/Kids[3 0 R]/Count 1>>",
        f"<</Type/Page/Parent 2 0 R/MediaBox[0 0 300 200]{annotations}/Contents 4 0 R{entries}"
        f"/Resources<</Font<</Helv 5 0 R>>{resources}>>>>",
        stream(content),
        "<</Type/Font/Subtype/Type1/BaseFont/Helvetica/Encoding/WinAnsiEncoding>>",
        f"<</Type/Annot{annotation}>>",
        stream(words, drawn),
        stream("0 g 5 5 20 20 re f", "/Type/XObject/Subtype/Form/BBox[0 0 30 30]"),
        further,
    )


def _layer(state: str) -> bytes:
    layers = f"/OCProperties<</OCGs[9 0 R]/D<</{state}[9 0 R]>>>>"
    properties, layer = "/Properties<</L 9 0 R>>", "<</Type/OCG/Name(L)>>"
    return page(
        content=f"/OC/L BDC {_BAR} EMC",
        resources=properties,
        catalogue=layers,
        further=layer,
    )


#: What a page holds, and its pixels below half of white at 72 dots an inch as pdftoppm draws them (poppler-utils 22.12,
#: ``pdftoppm -r 72 -gray -cropbox``).
PAGES: dict[str, tuple[bytes, int]] = {
    "text": (page(_TEXT, form=""), 334),
    "text with its appearance": (page(_TEXT + _WORDS, form=""), 334),
    "text whose appearance is to be made": (
        page(_TEXT, form="/NeedAppearances true"),
        334,
    ),
    "text that is read only": (page(f"{_TEXT}/Ff 1", form=""), 334),
    "text of several lines": (
        page(f"{_FIELD}{TALL}/FT/Tx/Ff 4096/T(a)/V(Hello\\nfield two)", form=""),
        438,
    ),
    "text in a comb": (page(f"{_TEXT}/Ff 16777216/MaxLen 11", form=""), 330),
    "text in UTF-16": (
        page(f"{_FIELD}{WIDE}/FT/Tx/T(a)/V<FEFF004800650069>", form=""),
        108,
    ),
    "text whose font is missing": (page(f"{_TEXT}/DA(/Foo 18 Tf 0 g)", form=""), 334),
    "text that nobody filled in": (page(f"{_FIELD}{WIDE}/FT/Tx/T(a)", form=""), 0),
    "text that is hidden": (
        page(f"/Subtype/Widget/F 2{WIDE}/FT/Tx/T(a)/V(Hello field){_WORDS}", form=""),
        0,
    ),
    "text that is for paper alone": (
        page(f"/Subtype/Widget/F 36{WIDE}/FT/Tx/T(a)/V(Hello field){_WORDS}", form=""),
        0,
    ),
    "text of a form in XFA, too": (
        page(_TEXT, form="/XFA[(template) 9 0 R]", further=stream("<xdp/>")),
        334,
    ),
    "text that the document's form has lost": (page(_TEXT + _WORDS), 334),
    "a hidden text that the form has lost": (
        page(f"/Subtype/Widget/F 2{WIDE}/FT/Tx/T(a)/V(Hello field){_WORDS}"),
        0,
    ),
    "a tick": (page(f"{_BUTTON}/V/Yes/AS/Yes{_MARK}", form=""), 400),
    "a tick without appearance": (
        page(f"{_BUTTON}/V/Yes/AS/Yes/MK<</CA(4)>>", form=""),
        69,
    ),
    "no tick": (page(f"{_BUTTON}/V/Off/AS/Off{_MARK}", form=""), 0),
    "one of several": (
        page(f"{_BUTTON}/Ff 32768/V/Yes/AS/Yes/MK<</CA(l)>>", form=""),
        130,
    ),
    "a choice": (page(f"{_FIELD}{WIDE}/Ff 131072{_CHOICE}", form=""), 334),
    "a choice with its appearance": (
        page(f"{_FIELD}{WIDE}/Ff 131072{_CHOICE}{_WORDS}", form=""),
        334,
    ),
    "a list": (page(f"{_FIELD}{TALL}{_CHOICE}", form=""), 3804),
    "a signature": (page(f"{_FIELD}{WIDE}/FT/Sig/T(a){_WORDS}", form=""), 334),
    "a button": (
        page(f"{_FIELD}{WIDE}/FT/Btn/Ff 65536/T(a)/MK<</CA(Hello field)>>", form=""),
        303,
    ),
    "a typed note": (
        page(f"/Subtype/FreeText/F 4{WIDE}/Contents(Hello field)/DA(/Helv 18 Tf 0 g)"),
        790,
    ),
    "a stamp": (page(f"/Subtype/Stamp/F 4{WIDE}{_WORDS}"), 334),
    "a pen's line": (
        page(
            f"/Subtype/Ink/F 4{WIDE}/InkList[[20 110 60 120 220 110]]/C[0 0 0]/BS<</W 3>>"
        ),
        600,
    ),
    "a box around": (page(f"/Subtype/Square/F 4{WIDE}/C[0 0 0]/BS<</W 3>>"), 1344),
    "a layer": (_layer("ON"), 3000),
    "a layer that is off": (_layer("OFF"), 0),
    "a page on its side": (page(content=_BAR, entries="/Rotate 90"), 3000),
    "a page that is cut": (page(content=_BAR, entries="/CropBox[0 90 70 200]"), 1500),
    "ink over ink": (
        page(
            content="/G gs 0 0 0 1 k 20 100 100 30 re f 0 1 0 0 k 20 100 50 30 re f",
            resources="/ExtGState<</G<</OP true/op true/OPM 1>>>>",
        ),
        3000,
    ),
}
