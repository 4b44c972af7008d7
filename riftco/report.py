"""A run directory as one self-contained HTML page: curves, final figures, configuration and samples.

The page loads nothing and runs nothing: charts are inline SVG (`riftco.charts`), and the theme follows the reader's.
It is made from the run's files alone, so it can be made again, on another machine, or in the middle of a run.
"""

import html
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

import riftco
from riftco.charts import Point, Series, line_chart, smooth
from riftco.errors import DataError
from riftco.files import json_lines, replace_file

Record = dict[str, Any]

_FIGURES = (
    ("loss", "Loss (nats a token)"),
    ("perplexity", "Perplexity"),
    ("bits_per_byte", "Bits per byte"),
    ("grad_norm", "Gradient norm"),
    ("clip_scale", "Clip scale"),
    ("learning_rate", "Learning rate"),
    ("tokens", "Tokens"),
    ("tokens_per_second", "Tokens per second"),
)


def write_report(run_dir: str | os.PathLike[str], path: str | os.PathLike[str] | None = None) -> Path:
    """Write report.html from a run's metrics.jsonl and, where they exist, config.yaml (or run.yaml) and samples.jsonl.

    A value that is missing or not finite leaves a gap in its curve and a dash in the tables. A line that is not a JSON
    object (a torn last line, say) is left out, and the page says how many were.

    Args:
        run_dir: the run directory.
        path: where to write; report.html inside the run directory by default. An existing file is replaced in one
            step, never left half-written.

    Returns:
        The path written.

    Raises:
        DataError: run_dir holds no metrics.jsonl, a configuration is not YAML, or the page cannot be written.
    """
    directory = Path(run_dir)
    if not (directory / "metrics.jsonl").is_file():
        raise DataError(
            f"report: a run directory holds metrics.jsonl; {directory} does not. "
            "Give the --out-dir of a run that has started."
        )
    records, torn = _read_lines(directory / "metrics.jsonl")
    samples, torn_samples = _read_lines(directory / "samples.jsonl")
    # The command line's flags where it ran the training, else the library's own form.
    config = _read_config(directory / "config.yaml") or _read_config(directory / "run.yaml")
    page = _page(directory.resolve().name, records, config, samples, torn + torn_samples)
    target = Path(path) if path is not None else directory / "report.html"
    try:
        replace_file(target, page.encode(errors="replace"))
    except OSError as error:
        raise DataError(
            f"report: it must be possible to write the page; {target}: {error.strerror}; choose another place"
        ) from error
    return target


# ---- reading ---------------------------------------------------------------------------------------------------------


def _read_lines(path: Path) -> tuple[list[Record], int]:
    """The JSON objects of a JSON-lines file, and how many lines were not one; nothing where there is no file."""
    lines = json_lines(path)
    records = [line.record for line in lines if line.record is not None]
    return records, len(lines) - len(records)


def _read_config(path: Path) -> list[tuple[str, str]]:
    """The configuration as dotted names and values."""
    if not path.is_file():
        return []
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise DataError(f"report: {path.name} must be YAML; {path} is not ({str(error).splitlines()[0]}).") from error
    return list(_flatten(config)) if isinstance(config, dict) else []


def _flatten(config: Mapping[Any, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    for key, value in config.items():
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", "—" if value is None else str(value)


def _number(record: Record, name: str) -> float:
    """A field as a float; NaN where it is missing, null or no number."""
    value = record.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return math.nan
    try:
        return float(value)
    except (ValueError, OverflowError):
        return math.nan


def _points(records: Sequence[Record], name: str) -> list[Point]:
    """(step, field) of the records that have both a step and the field, in the order of steps."""
    points = [(_number(record, "step"), _number(record, name)) for record in records if name in record]
    return sorted((point for point in points if math.isfinite(point[0])), key=lambda point: point[0])


# ---- writing ---------------------------------------------------------------------------------------------------------


_VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}


def _text(value: Any) -> str:
    """Escaped, with control characters made visible."""
    return html.escape(str(value).replace("\r\n", "\n").translate(_VISIBLE))


def _figure(value: float) -> str:
    size = abs(value)
    if not math.isfinite(value):
        return "—" if math.isnan(value) else ("∞" if value > 0 else "−∞")
    if size < 1e12 and (value == int(value) or size >= 999.95):
        return f"{value:,.0f}"
    return f"{value:#.4g}" if 0.01 <= size < 999.95 else f"{value:.4g}"


def _count(number: float, noun: str) -> str:
    return f"{_figure(number)} {noun}{'' if number == 1 else 's'}"


def _page(name: str, records: list[Record], config: list[tuple[str, str]], samples: list[Record], torn: int) -> str:
    train = [record for record in records if record.get("phase") == "train"]
    validation = [record for record in records if record.get("phase") == "validation"]
    sections = [
        f"<header><h1>{_text(name)}</h1><p>{_summary(train, validation)}</p></header>",
        _tiles(train, validation),
        _curves(train, validation),
        _figures_table(train, validation),
        _samples(samples),
        _config_table(config),
    ]
    if torn:
        sections.append(f'<p class="note">Left out, since no record: {_count(torn, "line")}.</p>')
    body = "\n".join(section for section in sections if section)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_text(name)} · riftco</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n{body}\n"
        f"<footer>Written by riftco {riftco.__version__}</footer>\n</main>\n</body>\n</html>\n"
    )


def _summary(train: list[Record], validation: list[Record]) -> str:
    if not train and not validation:
        return "Nothing has been recorded yet."
    steps = [step for step in (_number(record, "step") for record in train + validation) if math.isfinite(step)]
    words = [_count(max(steps), "step")] if steps else []
    tokens = [count for count in (_number(record, "tokens") for record in train) if math.isfinite(count)]
    if tokens:
        words.append(_count(max(tokens), "token"))
    words.append(_count(len(train), "training record"))
    words.append(_count(len(validation), "validation record"))
    return " · ".join(words)


def _best(validation: list[Record]) -> Record | None:
    known = [record for record in validation if math.isfinite(_number(record, "loss"))]
    return min(known, key=lambda record: _number(record, "loss")) if known else None


def _tiles(train: list[Record], validation: list[Record]) -> str:
    """The few figures that a reader looks for first."""
    best = _best(validation)
    tiles = []
    if validation:
        tiles.append(("Validation loss", _number(validation[-1], "loss"), "last"))
        tiles.append(("Perplexity", _number(validation[-1], "perplexity"), "validation"))
        tiles.append(("Bits per byte", _number(validation[-1], "bits_per_byte"), "validation"))
    if best is not None and best is not validation[-1]:
        tiles.append(("Best validation", _number(best, "loss"), f"loss, step {_figure(_number(best, 'step'))}"))
    if train:
        tiles.append(("Training loss", _number(train[-1], "loss"), "last batch"))
        tiles.append(("Speed", _number(train[-1], "tokens_per_second"), "tokens per second"))
    cells = [
        f'<div class="tile"><span>{label}</span><strong>{_figure(value)}</strong><small>{_text(about)}</small></div>'
        for label, value, about in tiles
        if math.isfinite(value)
    ]
    return f'<section class="tiles">{"".join(cells)}</section>' if cells else ""


def _curves(train: list[Record], validation: list[Record]) -> str:
    series = _smoothed("training", _points(train, "loss"))
    held_out = _points(validation, "loss")
    if held_out:
        series.append(Series("validation", held_out, 1, "dots"))
    figures = [_chart("Loss", "nats a token", series, wide=True)] if series else []
    rates = _points(train, "learning_rate")
    if rates:
        figures.append(_chart("Learning rate", "by step", [Series("learning rate", rates)], log=False))
    for name, title, unit in (
        ("grad_norm", "Gradient norm", "before clipping"),
        ("tokens_per_second", "Speed", "tokens per second"),
    ):
        # The first step after a start has no speed, and that is no gap worth a word.
        timed = [record for record in train if name != "tokens_per_second" or record.get(name) is not None]
        series = _smoothed(title, _points(timed, name))
        if series:
            unit += ", smoothed" if len(series) > 1 else ""
            figures.append(_chart(title, unit, series, log=name == "grad_norm"))
    return f'<section class="charts">{"".join(figures)}</section>' if figures else ""


def _smoothed(label: str, points: list[Point]) -> list[Series]:
    """The points faintly under their smoothed curve, or, where there are few, as they are."""
    span = len(points) // 40
    if span < 2:
        return [Series(label, points)] if points else []
    return [
        Series(f"{label}, each record", points, 0, "faint"),
        Series(f"{label}, smoothed over about {span} records", smooth(points, span)),
    ]


def _chart(title: str, unit: str, series: list[Series], *, wide: bool = False, log: bool = True) -> str:
    width, height = (960, 340) if wide else (340, 230)
    svg = line_chart(f"{title} ({unit})", series, width=width, height=height, log=log)
    legend = "".join(
        f'<span class="key"><i class="series-{row.color} {row.style}"></i>{_text(row.label)}</span>'
        for row in (series if wide and len(series) > 1 else [])
    )
    # The smoothed curve has the gaps of the one it was made from.
    gaps = len({(row.color, x) for row in series for x, y in row.points if not math.isfinite(y)})
    note = f'<p class="note">Not finite, and shown as gaps: {_count(gaps, "value")}.</p>' if gaps else ""
    return (
        f'<figure class="{"wide" if wide else "narrow"}"><figcaption><span><b>{title}</b> <small>{unit}</small></span>'
        f"{legend}</figcaption>{svg}{note}</figure>"
    )


def _figures_table(train: list[Record], validation: list[Record]) -> str:
    shown = [("Training, last", train[-1])] if train else []
    if validation:
        shown.append(("Validation, last", validation[-1]))
    best = _best(validation)
    if best is not None and best is not validation[-1]:
        shown.append(("Validation, best", best))
    if not shown:
        return ""
    head = "".join(f"<th>{title}</th>" for title, _ in shown)
    rows = [
        f"<tr><th>{label}</th>" + "".join(f"<td>{_figure(_number(record, name))}</td>" for _, record in shown) + "</tr>"
        for name, label in (("step", "Step"), *_FIGURES)
        if name == "loss" or any(record.get(name) is not None for _, record in shown)
    ]
    return (
        '<section><h2>Final figures</h2><div class="scroll"><table class="figures">'
        f"<thead><tr><td></td>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div></section>"
    )


def _samples(samples: list[Record]) -> str:
    cards = []
    for sample in samples:
        name = next((name for name in ("text", "completion", "sample", "output") if name in sample), "text")
        hidden = (name, "prompt", "ids", "prompt_ids")
        about = " · ".join(f"{_text(k).replace('_', ' ')} {_text(v)}" for k, v in sample.items() if k not in hidden)
        prompt = str(sample.get("prompt", ""))
        text = _text(sample.get(name, ""))
        cards.append(f"<article><small>{about}</small><pre><b>{_text(prompt)}</b>{text}</pre></article>")
    return f'<section><h2>Samples</h2><div class="samples">{"".join(cards)}</div></section>' if cards else ""


def _config_table(config: list[tuple[str, str]]) -> str:
    if not config:
        return ""
    rows = "".join(f"<div><dt>{_text(name)}</dt><dd>{_text(value)}</dd></div>" for name, value in config)
    return f'<section><h2>Configuration</h2><dl class="config">{rows}</dl></section>'


_STYLE = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #fff; --ink: #1b1f27; --soft: #5c6573; --rule: #dfe3e9;
  --first: #2158d4; --second: #c2410c; }
@media (prefers-color-scheme: dark) { :root { --page: #12151a; --card: #1a1e26; --ink: #e7eaf0; --soft: #9aa4b4;
  --rule: #2d333e; --first: #7aa7ff; --second: #ffa25c; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1040px; margin: 0 auto; padding: 28px 20px 40px; }
h1 { font-size: 26px; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 0 0 10px; }
header p, small, .note, .empty, footer, dt { color: var(--soft); }
header p { margin: 2px 0 20px; }
section { margin: 0 0 28px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; }
.tile, figure, article, .config, .figures { background: var(--card); border: 1px solid var(--rule);
  border-radius: 10px; }
.tile { padding: 12px 16px; display: flex; flex-direction: column; }
.tile span { font-size: 13px; color: var(--soft); }
.tile strong { font-size: 25px; line-height: 1.25; font-variant-numeric: tabular-nums; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(300px, 1fr)); gap: 12px; }
figure { margin: 0; padding: 12px 16px; min-width: 0; overflow-x: auto; }
.wide { grid-column: 1 / -1; }
.wide svg { min-width: 560px; }
figcaption { margin-bottom: 6px; display: flex; flex-wrap: wrap; gap: 0 18px; }
figcaption > span:first-child { flex: 1; white-space: nowrap; }
.key { font-size: 13px; color: var(--soft); }
.key i { display: inline-block; width: 18px; border-top: 3px solid; margin-right: 6px; vertical-align: middle; }
.key i.dots { width: 9px; height: 9px; border: 0; border-radius: 50%; background: currentColor; }
svg { display: block; width: 100%; height: auto; }
.grid { stroke: var(--rule); } .tick { stroke: var(--soft); } .axis { fill: var(--soft); }
svg text { font-family: system-ui, sans-serif; font-variant-numeric: tabular-nums; }
.series-0 { stroke: var(--first); color: var(--first); } .series-1 { stroke: var(--second); color: var(--second); }
polyline { fill: none; stroke-width: 2; stroke-linejoin: round; }
polyline.faint { stroke-width: 1; } .faint { opacity: 0.35; }
circle.dot { fill: currentColor; stroke: none; }
.note, .empty { font-size: 13px; margin: 6px 0 0; }
.scroll { overflow-x: auto; }
.figures { border-collapse: separate; border-spacing: 0; width: 100%; font-variant-numeric: tabular-nums; }
.figures th, .figures td { padding: 7px 16px; text-align: right; border-bottom: 1px solid var(--rule); }
.figures tbody tr:last-child > * { border-bottom: 0; }
.figures tbody th { text-align: left; font-weight: 400; color: var(--soft); }
.figures thead th { font-size: 14px; }
.samples { display: grid; gap: 12px; }
article { padding: 12px 16px; }
pre { margin: 4px 0 0; white-space: pre-wrap; overflow-wrap: anywhere; font: 14px/1.5 ui-monospace, monospace; }
pre b { color: var(--first); }
.config { margin: 0; padding: 10px 16px; columns: 320px; column-gap: 32px; font-size: 14px; }
.config div { display: flex; justify-content: space-between; gap: 16px; padding: 3px 0; break-inside: avoid; }
dd { margin: 0; text-align: right; overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
footer { font-size: 13px; }
@media print { body { background: none; } }
"""
