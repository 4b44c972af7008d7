"""From a base and adapters on disk to one bundle that says what it was merged from; the arithmetic is merging.py's."""

import dataclasses
import os
from pathlib import Path

from riftco import bundle
from riftco.bundle.directories import keep_source
from riftco.bundle.manifest import MERGE_RECORD, pretty_json
from riftco.errors import BundleError
from riftco.files import replace_file
from riftco.tune.bases import PACKED, adapter_identity, find_adapter, load_adapter, load_base, trained_beside
from riftco.tune.merging import LogitDifference, logit_difference, merge

"""What merging measured; no part of the bundle's identity."""


@dataclasses.dataclass(frozen=True)
class Merged:
    """What was written.

    Attributes:
        artifact_id: of the new bundle.
        base: the identity of the base.
        adapter: the identity of the adapters.
        differences: how far its logits are from what it was made of, for adapters beside a base in 4 bits; by name.
    """

    artifact_id: str
    base: str
    adapter: str
    differences: dict[str, LogitDifference]


def merge_to_bundle(
    model: str | os.PathLike[str],
    adapter: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    force: bool = False,
) -> Merged:
    """Write the bundle that answers as a base with its adapters.

    Weights keep the dtype that the base is stored in. Adapters that were trained beside 4 bits are merged onto those
    numbers decoded; the result says how far its logits are from the packed base with adapters, and, where the base is
    plain, from the base itself with them. `merge.json` beside the bundle's files records it, and no digest does: a
    measurement's last digits are the machine's, and equal weights would have several identities.

    Args:
        model: the base; or, for such adapters, the packed base.
        adapter: a run directory, its final/, or a directory that PEFT wrote.
        directory: where; it must not exist, unless `force`.
        force: replace an existing bundle, but neither the base nor the adapters.

    Raises:
        BundleError: for another base, adapters that were merged into this base already, a run that has not finished,
            or a destination that cannot be written.
    """
    place, target = find_adapter(adapter), Path(os.path.abspath(directory))
    base = load_base(model, dtype="stored")
    for source in (base.path, place):
        keep_source("merge", target, source)
    if os.path.lexists(target) and not force:
        raise BundleError(
            f"merge: {target} must not exist; it does; choose another --out-dir, or replace it with --force"
        )
    found = load_adapter(adapter, base)
    beside = trained_beside(base, adapter, found)
    params = merge(beside, found.adapters, base.config)
    differences: dict[str, LogitDifference] = {}
    facts = {} if found.manifest is None else found.manifest["fingerprints"]
    if PACKED in facts or base.is_packed:
        options = {"left_adapters": found.adapters}
        differences["packed_base_with_adapters"] = logit_difference(beside, params, base.config, **options)
        if not base.is_packed:
            name = "base_with_adapters"
            differences[name] = logit_difference(base.params, params, base.config, **options)
    identity = adapter_identity(place)
    fingerprints = {**facts, bundle.MERGED: identity}
    template = fingerprints.pop("chat_template", base.chat_template)
    artifact_id = bundle.save(
        target, params, base.config, base.tokenizer, stage="merge", parent=base.identity, fingerprints=fingerprints,
        generation=base.generation, chat_template=template, force=force,
    )  # fmt: skip
    if differences:
        record = {"artifact_id": artifact_id, **{name: values._asdict() for name, values in differences.items()}}
        replace_file(target / MERGE_RECORD, pretty_json(record))
    return Merged(artifact_id, base.identity, identity, differences)
