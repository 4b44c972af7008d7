"""What a checkpoint says about itself: names, shapes and checksums of its arrays, the caller's JSON, a seal over it.

The storage format does not notice a changed byte inside a large array; these checksums do.
"""

import json
import zlib
from typing import Any

import jax
import numpy as np

from riftco.errors import CheckpointError
from riftco.tree import describe, named_leaves
from riftco.types import PyTree

FORMAT = 1


def array_record(state: PyTree) -> dict[str, list[Any]]:
    """{dotted name: [shape and dtype, CRC-32 of the bytes]}; the checksum is None where a process sees only a part."""
    return {name: [describe(leaf), _checksum(leaf)] for name, leaf in named_leaves(state)}


def seal(step: int, meta: dict[str, Any], metrics: dict[str, float], arrays: dict[str, list[Any]]) -> dict[str, Any]:
    """The JSON record of one checkpoint, with a checksum over its own text.

    Raises:
        CheckpointError: if `meta` or `metrics` cannot be JSON.
    """
    try:
        record = _through_json({"format": FORMAT, "step": step, "meta": meta, "metrics": metrics, "arrays": arrays})
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"checkpoint {step}: meta and metrics must be JSON; {error}. Keep arrays in the state and the rest plain."
        ) from error
    return {**record, "seal": _text_checksum(record)}


def unseal(record: Any) -> dict[str, Any]:
    """The record if its seal holds.

    Raises:
        CheckpointError: if it is not a whole, unchanged record of a format that is known.
    """
    if not isinstance(record, dict) or record.get("seal") != _text_checksum(
        {key: value for key, value in record.items() if key != "seal"}
    ):
        raise CheckpointError("the record was changed after it was written")
    if record["format"] != FORMAT:
        raise CheckpointError(f"the record has format {record['format']}; this version reads {FORMAT}")
    return record


def array_differences(saved: dict[str, list[Any]], wanted: PyTree) -> list[str]:
    """One line for each array that only one side has, or whose shape or dtype differs; [] when they agree."""
    ours = {name: describe(leaf) for name, leaf in named_leaves(wanted)}
    lines = [f"{name}: not in the checkpoint" for name in ours if name not in saved]
    lines += [f"{name}: only in the checkpoint" for name in saved if name not in ours]
    lines += [
        f"{name}: saved {saved[name][0]}, now {ours[name]}"
        for name in ours
        if name in saved and saved[name][0] != ours[name]
    ]
    return lines


def corrupted(saved: dict[str, list[Any]], state: PyTree) -> list[str]:
    """The names of the arrays whose bytes are not those that were saved."""
    found = {name: _checksum(leaf) for name, leaf in named_leaves(state)}
    return [name for name, (_, crc) in saved.items() if None not in (crc, found[name]) and crc != found[name]]


def config_differences(saved: Any, current: Any, *, ignore: tuple[str, ...] = ()) -> list[str]:
    """One line, `field: saved …, now …`, for each field in which two configurations differ.

    Args:
        saved: nested dicts and lists, as read from a checkpoint's meta.
        current: the same as this run has it; compared as its JSON form, so a tuple equals a list.
        ignore: dotted names of fields, or of groups of fields, that may differ.

    Returns:
        Lines in the order of the fields; [] when the two agree.
    """
    ours, theirs = _flatten(_through_json(saved)), _flatten(_through_json(current))
    ignored = lambda name: any(name == field or name.startswith(f"{field}.") for field in ignore)
    names = [name for name in {**ours, **theirs} if not ignored(name)]
    show = lambda side, name: json.dumps(side[name]) if name in side else "absent"
    return [
        f"{name or '(all)'}: saved {show(ours, name)}, now {show(theirs, name)}"
        for name in names
        if show(ours, name) != show(theirs, name)
    ]


def check_config(saved: Any, current: Any, *, ignore: tuple[str, ...] = ()) -> None:
    """Refuse a configuration that is not the one a checkpoint was saved with.

    Arguments are those of `config_differences`.

    Raises:
        CheckpointError: if they differ, listing each field with both values.
    """
    if lines := config_differences(saved, current, ignore=ignore):
        raise CheckpointError(
            f"resume: the configuration must be the one that was saved; {'; '.join(lines)}. "
            "Restore these values, or start a new run in another directory."
        )


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict) or not value:
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        flat |= _flatten(inner, f"{prefix}.{key}" if prefix else str(key))
    return flat


def _through_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _text_checksum(record: Any) -> int:
    return zlib.crc32(json.dumps(record, sort_keys=True).encode())


def _checksum(leaf: Any) -> int | None:
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        if not leaf.is_fully_replicated:
            return None
        leaf = leaf.addressable_data(0)
    # A view of the bytes, not a copy: reshape before view, because a scalar has no last axis to reinterpret.
    return zlib.crc32(np.ascontiguousarray(np.asarray(leaf)).reshape(-1).view(np.uint8).data)
