"""A report as tables in Markdown, and its own summary over seeds."""

import statistics
from typing import Any

SPLITS = {
    "train": "train",
    "validation": "validation",
    "test_known": "test, known pairs",
    "test_held_out": "test, held-out pairs",
}


def spread(values: list[float], digits: int = 3) -> str:
    """Mean ± standard deviation; the mean alone of one value."""
    mean = f"{statistics.fmean(values):.{digits}f}"
    return mean if len(values) < 2 else f"{mean} ± {statistics.stdev(values):.{digits}f}"


def markdown(report: dict[str, Any]) -> str:
    """The whole report for reading."""
    about, selected = report["about"], report["selected"]
    names = {candidate["name"]: candidate for candidate in about["candidates"]}
    lines = [
        f"# Generalization, profile {about['profile']}",
        "",
        f"Commit {about['commit']}, {about['date']}, jax {about['jax']}, {about['machine']}. "
        f"Seeds {', '.join(map(str, about['seeds']))}; mean ± standard deviation over them. Losses are nats per answer "
        "token.",
        f"Test split opened once, for the base and {', '.join(selected.values())}; it is spent and "
        "must not select anything again.",
        "",
        "## Every candidate, as the selection saw it",
        "",
        "| Candidate | Rate | Trained scalars | Train loss | Validation loss | Validation exact | Gap | Selected |",
        "|---|---|---|---|---|---|---|---|",
    ]
    base = report["base"]
    lines.append(
        f"| base | | 0 | {base['train']['loss']:.3f} | {base['validation']['loss']:.3f} "
        f"| {base['validation']['exact']:.3f} | {base['validation']['loss'] - base['train']['loss']:+.3f} | |"
    )
    for name, seeds in report["candidates"].items():
        of = lambda split, figure, seeds=seeds: [found[split][figure] for found in seeds.values()]
        gaps = [b - a for a, b in zip(of("train", "loss"), of("validation", "loss"), strict=True)]
        lines.append(
            f"| {name} | {names[name]['learning_rate']:g} | {about['trained'][name]:,} | {spread(of('train', 'loss'))} "
            f"| {spread(of('validation', 'loss'))} | {spread(of('validation', 'exact'))} | {spread(gaps)} "
            f"| {'yes' if name in selected.values() else ''} |"
        )
    lines += [
        "",
        "## The base and the selected ones, on all splits",
        "",
        "| Model | Split | Loss | Δ base | L − L(train) | Token accuracy | Exact answers |",
        "|---|---|---|---|---|---|---|",
    ]
    for split, title in SPLITS.items():
        row = base[split]
        lines.append(
            f"| base | {title} | {row['loss']:.3f} | | {row['loss'] - base['train']['loss']:+.3f} "
            f"| {row['accuracy']:.3f} | {row['exact']:.3f} |"
        )
    for name in selected.values():
        seeds = report["candidates"][name].values()
        for split, title in SPLITS.items():
            lines.append(
                f"| {name} | {title} | {spread([s[split]['loss'] for s in seeds])} "
                f"| {spread([s[split]['loss'] - base[split]['loss'] for s in seeds])} "
                f"| {spread([s[split]['loss'] - s['train']['loss'] for s in seeds])} "
                f"| {spread([s[split]['accuracy'] for s in seeds])} | {spread([s[split]['exact'] for s in seeds])} |"
            )
    ranks = [c for c in about["candidates"] if c["method"] == "lora"]
    lines += [
        "",
        "## Rank sweep (LoRA, alpha = 2 × rank, the best rate of each)",
        "",
        "| Rank | Rate | Validation loss | Exact |",
        "|---|---|---|---|",
    ]
    for rank in sorted({candidate["rank"] for candidate in ranks}):
        of = lambda c: [s["validation"]["loss"] for s in report["candidates"][c["name"]].values()]
        best = min((c for c in ranks if c["rank"] == rank), key=lambda c: statistics.fmean(of(c)))
        exact = [s["validation"]["exact"] for s in report["candidates"][best["name"]].values()]
        lines.append(f"| {rank} | {best['learning_rate']:g} | {spread(of(best))} | {spread(exact)} |")
    return "\n".join(lines) + "\n"
