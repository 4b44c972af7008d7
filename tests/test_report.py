"""The report page: what it shows, what it survives, and that it needs nothing from outside."""

import json
import math
import re
from html.parser import HTMLParser

import pytest

from riftco import charts
from riftco.errors import DataError
from riftco.report import _figure, write_report

VOID = {"meta", "line", "circle", "polyline"}


class Page(HTMLParser):
    """Well-formedness: every element closed in its order; every URL attribute collected."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.urls, self.words = [], [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.urls += [value for name, value in attributes if name in ("src", "href", "xlink:href", "action", "data")]
        assert not any(name.startswith("on") for name, _ in attributes)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        assert tag in VOID

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self):
        return "".join(self.words)


def train(step, **fields):
    return {
        "phase": "train",
        "step": step,
        "loss": 4 - step / 100,
        "perplexity": 9.0,
        "grad_norm": 0.5,
        "clip_scale": 1.0,
        "learning_rate": 1e-3,
        "tokens": step * 100,
        "tokens_per_second": 12345.0,
    } | fields


def validation(step, loss):
    return {"phase": "validation", "step": step, "loss": loss, "perplexity": math.exp(loss), "bits_per_byte": 2.5}


def report(directory, records, *, config=None, samples=None, tail=""):
    (directory / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records) + tail)
    if config is not None:
        (directory / "config.yaml").write_text(config)
    if samples is not None:
        (directory / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    path = write_report(directory)
    assert path == directory / "report.html"
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert "script" not in page.tags and "link" not in page.tags and page.urls == []
    assert not re.search(r"url\(|@import|https?:", text)
    assert "nan" not in text.lower() and "inf," not in text
    return page, text


@pytest.mark.tiny
def test_a_run_shows_its_curves_figures_configuration_and_samples(tmp_path):
    records = [train(step) for step in range(1, 201)]
    records[0]["tokens_per_second"] = None  # as the loop writes it for a step that compiles
    records += [validation(100, 1.25), validation(200, 1.75)]
    page, text = report(
        tmp_path,
        records,
        config="model:\n  width: 64\n  rope_scaling: null\nseed: 7\n",
        samples=[{"prompt": "Once", "text": " upon a time", "seed": 3}],
    )
    assert page.tags.count("svg") == 4
    assert "200 steps · 20,000 tokens · 200 training records · 2 validation records" in page.text
    assert "1.750" in page.text and "loss, step 100" in page.text  # the last figure, and the best beside it
    assert "shown as gaps" not in page.text
    assert "12,345" in page.text and "bits per byte" in page.text.lower()
    assert "model.width" in page.text and "64" in page.words and "model.rope_scaling" in page.text
    assert "<b>Once</b> upon a time" in text
    assert text.count('class="series-1 dot"') == 2
    assert "training, smoothed over about 5 records" in page.text
    assert "prefers-color-scheme: dark" in text


def test_what_a_user_wrote_is_escaped(tmp_path):
    nasty = '<script>alert("x")</script> & \x07'
    page, text = report(
        tmp_path,
        [train(1)],
        config=json.dumps({nasty: nasty}),
        samples=[{"prompt": nasty, "text": nasty + " \ud800 tail", nasty: nasty}],
    )
    assert "<script" not in text
    assert page.text.count('<script>alert("x")</script> & ␇') == 6


@pytest.mark.parametrize("records", [[], [train(1)], [validation(1, 2.0)], [train(1), train(1)], [{"phase": "train"}]])
def test_runs_that_have_hardly_begun(tmp_path, records):
    page, _ = report(tmp_path, records)
    assert ("Nothing has been recorded yet." in page.text) == (records == [])


def test_values_that_are_missing_or_not_finite_are_gaps(tmp_path):
    records = [train(step) for step in range(1, 11)]
    records[4]["loss"] = math.nan
    records[5]["loss"] = None
    records[6]["loss"] = math.inf
    del records[7]["loss"]
    records[9] |= {"grad_norm": "NaN", "tokens": True}
    page, text = report(tmp_path, records)
    loss = text.split("<svg")[1].split("</svg>")[0]
    # Four points, a gap of three, then the last two; a record without the field is passed over.
    assert [len(line.split()) for line in re.findall(r'points="([^"]*)"', loss)] == [4, 2]
    assert "shown as gaps: 3 values" in page.text
    assert "—" in page.text


def test_all_values_not_finite(tmp_path):
    page, _ = report(tmp_path, [train(1, loss=math.nan), train(2, loss=math.inf)])
    assert "No finite values were recorded." in page.text


def test_torn_and_foreign_lines_are_left_out_and_counted(tmp_path):
    page, _ = report(tmp_path, [train(1), [1, 2], train(2)], tail='{"phase": "train", "st')
    assert "2 training records" in page.text
    assert "Left out, since no record: 2 lines." in page.text


def test_writing_replaces_in_one_step_and_leaves_nothing_else(tmp_path):
    report(tmp_path, [train(1)])
    report(tmp_path, [train(1), train(2)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "report.html"]
    elsewhere = write_report(tmp_path, tmp_path / "other.html")
    assert elsewhere.read_bytes() == (tmp_path / "report.html").read_bytes()


def test_no_run_and_no_yaml_are_one_sentence(tmp_path):
    with pytest.raises(DataError, match=r"holds metrics.jsonl"):
        write_report(tmp_path)
    with pytest.raises(DataError, match=r"config.yaml must be YAML"):
        report(tmp_path, [train(1)], config="a: [1,")


def test_ticks_are_round_and_hold_the_data():
    axis = charts._Axis.around([0.93, 4.17], (0.0, 100.0))
    assert list(axis.ticks) == [0, 1, 2, 3, 4, 5] and axis.at(0) == 0 and axis.at(5) == 100
    steps = charts._Axis.around([1, 3], (0.0, 100.0), tight=True, whole=True)
    assert list(steps.ticks) == [1, 2, 3]
    decades = charts._Axis.around([0.5, 3000.0], (0.0, 100.0), logarithmic=True)
    assert decades.ticks == [0.1, 1.0, 10.0, 100.0, 1000.0, 10000.0] and decades.at(0.1) == 0
    one = charts._Axis.around([2.0], (0.0, 100.0))
    assert one.low < 2.0 < one.high
    labels = [charts.tick_label(v) for v in (0, 1500, 2e7, 0.05, 3e-5, -2.5, 1e15)]
    assert labels == ["0", "1.5k", "20M", "0.05", "3e-5", "-2.5", "1e15"]


def test_figures_have_four_digits_and_no_loose_point():
    figures = [
        _figure(value) for value in (1.64, 999.96, 2585.7, 29016.4, 1.0, 0.0, 1e-4, 3.1e15, -0.25, math.inf, math.nan)
    ]
    assert figures == ["1.640", "1,000", "2,586", "29,016", "1", "0", "0.0001", "3.1e+15", "-0.2500", "∞", "—"]


def test_smoothing_lags_behind_nothing():
    line = [(float(n), 2.0 * n) for n in range(50)]
    assert [y for _, y in charts.smooth(line, 9)] == pytest.approx([y for _, y in line])
    spike = [y for _, y in charts.smooth([(float(n), 9.0 * (n == 3)) for n in range(7)], 3)]
    assert spike == pytest.approx([0, 0, 3, 3, 3, 0, 0])
    holed = [(0.0, 1.0), (1.0, math.nan), (2.0, 3.0)]
    smoothed = charts.smooth(holed, 3)
    assert math.isnan(smoothed[1][1]) and smoothed[0][1] == 1.0 and smoothed[2][1] == 3.0


def test_long_lines_are_thinned_and_keep_their_extremes():
    points = [(float(n), math.sin(n)) for n in range(20_000)]
    points[7777] = (7777.0, 9.0)
    thin = charts._runs(points)[0]
    assert len(thin) <= 1200 and (7777.0, 9.0) in thin and thin == sorted(thin)
