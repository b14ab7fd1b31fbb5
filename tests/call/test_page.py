"""python -m oomkit report --html: one page, by a parser everywhere, by Chromium where it is."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from oomkit import __main__ as program
from oomkit._reports.page import Line, chart, page

MIB = 1 << 20
VOID = {"meta", "br"}


def row(step, **changes):
    phases = {
        name: {"baseline": MIB, "peak_allocated": peak * MIB, "peak_reserved": None,
               "time": 0.1, "ooms": 0}
        for name, peak in (("forward", 2), ("backward", 3), ("optimizer", 1))
    }  # fmt: skip
    return {
        "step": step,
        "label": "train",
        "batch_size": 8,
        "micro_batch_size": 8,
        "accumulation_steps": 1,
        "attempts": 1,
        "ooms": 0,
        "peak_allocated": 3 * MIB,
        "peak_reserved": None,
        "budget": 4 * MIB,
        "time": 0.3,
        "time_lost": 0.0,
        "rung": 0,
        "reason": "whole",
        "outcome": "finished",
        "phases": phases,
        **changes,
    }


OOM = {"micro_batch_size": 4, "accumulation_steps": 2, "ooms": 1, "attempts": 2, "reason": "oom"}
ROWS = [row(1), row(2), row(3, **OOM), row(4, label="eval & <more>", phases=None)]


class Page(HTMLParser):
    """Elements with their attributes and text; tags that do not match are an error."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements = [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        element = {"tag": tag, "text": "", **dict(attributes)}
        self.elements.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_startendtag(self, tag, attributes):
        self.elements.append({"tag": tag, "text": "", **dict(attributes)})

    def handle_endtag(self, tag):
        assert self.open.pop()["tag"] == tag

    def handle_data(self, data):
        for element in self.open:
            element["text"] += data

    def all(self, tag, **attributes):
        return [
            e
            for e in self.elements
            if e["tag"] == tag and all(e.get(k) == v for k, v in attributes.items())
        ]


@pytest.fixture
def written(tmp_path, capsys):
    def write(*runs):
        files = []
        for name, rows in runs:
            files.append(tmp_path / f"{name}.jsonl")
            files[-1].write_text("".join(json.dumps(r) + "\n" for r in rows))
        out = tmp_path / "report.html"
        assert program.main(["report", *map(str, files), "--html", str(out)]) == 0
        assert "train" in capsys.readouterr().out
        return out

    return write


def test_the_page_is_whole_and_needs_no_network(written):
    text = written(("run", ROWS)).read_text()
    parsed = Page(text)
    assert parsed.all("html")[0]["lang"] == "en"
    assert len(parsed.all("h1")) == len(parsed.all("main")) == 1
    assert not re.search(r"(src|href)=\"(?!#)|url\(|@import|https?:", text)
    policy = parsed.all("meta", **{"http-equiv": "Content-Security-Policy"})[0]["content"]
    assert policy.startswith("default-src 'none'")
    assert "prefers-color-scheme: dark" in text


def test_each_label_has_its_section_and_what_is_in_it(written):
    parsed = Page(written(("run", ROWS)).read_text())
    assert [h["text"] for h in parsed.all("h2")] == ["train", "eval & <more>"]
    captions = [c["text"] for c in parsed.all("caption")]
    assert captions.count("Phases") == captions.count("Events") == 1
    titles = [f["text"] for f in parsed.all("figcaption")]
    assert "Peak allocated by phase" in titles and "Peak allocated" in titles
    (mark,) = parsed.all("title")[1:]
    assert mark["text"] == "step 3: 1 OOM, 8 rows in 2 × 4, reason oom"
    keys = {e["text"] for e in parsed.all("li")}
    assert {"forward", "backward", "optimizer", "limit", "event"} <= keys


def test_it_is_usable_by_keyboard(written):
    parsed = Page(written(("run", ROWS)).read_text())
    anchors = {e["href"] for e in parsed.all("a")}
    assert {e.get("id") for e in parsed.elements} >= {anchor[1:] for anchor in anchors}
    for figure in parsed.all("figure"):
        assert figure["tabindex"] == "0" and figure["aria-label"]
    for region in parsed.all("div", **{"class": "scroll"}):
        assert region["tabindex"] == "0" and region["aria-label"]
    assert all("scope" in cell for cell in parsed.all("th"))
    assert len(parsed.all("output", **{"aria-live": "polite"})) == len(parsed.all("figure"))


def test_two_runs_are_compared(written):
    later = [row(n, peak_allocated=6 * MIB, time=0.15) for n in (1, 2)]
    parsed = Page(written(("one", ROWS), ("two", later)).read_text())
    lines = {
        line["text"] for line in parsed.all("tr") if line["text"].startswith(("peak max", "OOMs"))
    }
    assert lines == {"peak max3.00 MiB6.00 MiB+100.0 %", "OOMs10-1"}
    assert "Peak allocated: train" in [f["text"] for f in parsed.all("figcaption")]


def test_a_page_without_records_and_runs_without_a_common_label():
    assert "No records." in page([("none", [])])
    assert "no label in common" in page([("a", ROWS[:1]), ("b", ROWS[3:])])


def test_long_runs_are_thinned_to_their_highest():
    values = [1.0] * 10_000
    values[5_001] = 9.0
    drawn = chart("x", range(10_000), [Line("v", "peak", values)], str, [(7, "said")])
    points = json.loads(Page(drawn).all("figure")[0]["data-points"])
    assert len(points) <= 460 and sum("v 9.0" in text for _, text in points) == 1
    assert points[0][1].endswith("said")


@pytest.fixture
def chromium(tmp_path):
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        pytest.skip("Chromium is not installed (Debian: apt-get install chromium)")

    def run(*arguments):
        command = [found, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += [f"--user-data-dir={tmp_path / 'profile'}", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
        return done.stdout

    return run


def test_chromium_reads_it_by_arrow_keys(written, chromium):
    path = written(("run", ROWS))
    press = """<script>
    const figure = document.querySelector(".chart");
    for (const key of ["End", "ArrowLeft"])
      figure.dispatchEvent(new KeyboardEvent("keydown", {key}));
    </script></body>"""
    path.write_text(path.read_text().replace("</body>", press))
    parsed = Page(chromium("--dump-dom", path.as_uri()))
    texts = [o["text"] for o in parsed.all("output")]
    assert (
        "step 2: forward 2.00 MiB, backward 3.00 MiB, optimizer 1.00 MiB, limit 4.00 MiB" in texts
    )


def test_chromium_draws_it_light_and_dark(written, chromium, tmp_path):
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    path = written(("run", ROWS))
    grounds = []
    for scheme in (1, 0):  # light, dark
        picture = tmp_path / f"{scheme}.png"
        chromium(
            f"--blink-settings=preferredColorScheme={scheme}",
            f"--screenshot={picture}",
            "--window-size=1100,900",
            path.as_uri(),
        )
        pixels = imread(picture)[..., :3]
        grounds.append(pixels[2, 2].mean())
        assert len({tuple(p) for p in pixels[::5, ::5].reshape(-1, 3).tolist()}) > 20
    assert grounds[0] > 0.95 and grounds[1] < 0.15
