"""`riftco inspect`: what a path holds, or what a configuration of flags would hold.

Models, adapters and the formats of other programs are described by inspect_models.py.
"""

import dataclasses
from pathlib import Path
from typing import Any

from riftco.cli import tokenizer as tokenizer_verb
from riftco.cli.console import Console
from riftco.cli.inspect_models import show_adapters, show_container
from riftco.cli.model_options import ModelOptions, decoder_config
from riftco.cli.models import ADAPTER
from riftco.cli.options import flag
from riftco.cli.verbs import Action
from riftco.errors import BundleError
from riftco.files import json_lines

_OPENERS = {
    "gpt2": "transformers (GPT2LMHeadModel), vLLM",
    "llama": "transformers (LlamaForCausalLM), vLLM",
    "mistral": "transformers (MistralForCausalLM), vLLM",
    "qwen2": "transformers (Qwen2ForCausalLM), vLLM",
    "qwen3": "transformers (Qwen3ForCausalLM), vLLM",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class InspectOptions(ModelOptions):
    """Options of `inspect`."""

    model: str | None = flag(
        None,
        "a model in any format, adapters, a run, checkpoint, tokenizer or dataset; without it, what the flags describe",
        metavar="PATH",
    )
    batch_size: int = flag(1, "rows, for the count of residual bytes")


def run(options: InspectOptions, console: Console) -> dict[str, Any]:
    """Tell the kind of thing by its files, and print it."""
    if options.model is None:
        return _show_config(decoder_config(options), options.batch_size, console)
    place = Path(options.model)
    if not place.exists():
        raise BundleError(f"inspect: {place} does not exist; check the path")
    if (place / "manifest.json").is_file():
        return _show_dataset(place, console)
    if (place / "_CHECKPOINT_METADATA").is_file():
        return _show_checkpoint(place, console)
    is_model = place.suffix.lower() == ".gguf" or any((place / name).is_file() for name in _MODEL_FILES)
    if not is_model and (place / "metrics.jsonl").is_file():
        return _show_run(place, options.batch_size, console)
    if not is_model and (place.is_file() or (place / "tokenizer.json").is_file()):
        return {"kind": "tokenizer", **tokenizer_verb.run_inspect(_TokenizerAt(tokenizer=options.model), console)}
    return _show_model(place, options.batch_size, console)


_MODEL_FILES = (ADAPTER, "riftco.json", "config.json", "riftco_onnx.json", "model.gguf")
_TokenizerAt = tokenizer_verb.InspectOptions


def _show_config(config: Any, batch_size: int, console: Console) -> dict[str, Any]:
    """Configuration, leaves, counts, who opens it, what a backward pass keeps."""
    from riftco.models import parameter_count, spec
    from riftco.models.families import FAMILIES, family_of, refusal

    for name, value in config.to_dict().items():
        console.say(f"  {name:<18}{value}")
    console.say(f"\n  {'leaf':<40}{'shape':<20}scalars")
    leaves = {name: list(leaf.shape) for name, leaf in spec(config).items()}
    for name, leaf in spec(config).items():
        console.say(f"  {name:<40}{leaf.shape!s:<20}{leaf.size:,}")
    count, kept = parameter_count(config), residual_bytes(config, batch_size)
    family = family_of(config)
    console.say(f"\n  {count:,} parameters, {4 * count:,} bytes in float32")
    console.say(f"  {kept:,} residual bytes for the backward pass of {batch_size} × {config.context} tokens in float32")
    opens = f"riftco, {_OPENERS[family]}" if family in _OPENERS else "riftco alone"
    console.say(f"  saved as model_type {family!r}, which these open: {opens}")
    if family == "riftco":
        for other in FAMILIES:
            if (reason := refusal(config, other)) is not None:
                console.say(f"    not {other}: {reason}")
    return {
        "kind": "config",
        "config": config.to_dict(),
        "leaves": leaves,
        "parameters": count,
        "residual_bytes": kept,
        "model_type": family,
        "opened_by": opens.split(", "),
    }


def residual_bytes(config: Any, batch_size: int) -> int:
    """Bytes that the backward pass of one batch keeps, found by tracing: no array is made.

    Args:
        config: a `DecoderConfig`.
        batch_size: rows of `config.context` tokens.
    """
    import jax
    import jax.numpy as jnp

    import riftco
    from riftco.models import abstract, loss

    tokens = jax.ShapeDtypeStruct((batch_size, config.context), jnp.int32)

    def backward(params: Any, inputs: Any) -> Any:
        return riftco.vjp(lambda p: loss(p, inputs, inputs, dataclasses.replace(config, dropout=0.0)), params)[1]

    return jax.eval_shape(backward, abstract(config), tokens).residual_bytes()


def _show_model(path: Path, batch_size: int, console: Console) -> dict[str, Any]:
    from riftco.interchange import load_config, locate

    if (path / ADAPTER).is_file():
        return show_adapters(path, console)
    place, kind = locate(path)
    about = show_container(place, kind, console)
    return {**_show_config(load_config(place), batch_size, console), **about, "path": place}


def _show_run(place: Path, batch_size: int, console: Console) -> dict[str, Any]:
    """The last figures of a run, then its model if it has one."""
    records = [line.record for line in json_lines(place / "metrics.jsonl") if line.record is not None]
    last = {str(record.get("phase")): record for record in records}
    steps = sorted((int(path.name) for path in (place / "checkpoints").glob("*") if path.name.isdigit()), reverse=False)
    console.say(f"{place}: a run; checkpoints {', '.join(map(str, steps)) or 'none'}")
    for phase, record in last.items():
        figures = ", ".join(f"{k} {v:.5g}" for k, v in record.items() if isinstance(v, int | float))
        console.say(f"  last {phase}: {figures}")
    summary = {"kind": "run", "path": place, "checkpoints": steps, "last": last}
    if (place / "final" / ADAPTER).is_file():
        summary["adapter"] = _show_adapter(place / "final", console)
    elif (place / "final").is_dir():
        summary["model"] = _show_model(place / "final", batch_size, console)
    else:
        console.say("  no final/: the run has not finished; --resume auto goes on")
    return summary


def _show_adapter(place: Path, console: Console) -> dict[str, Any]:
    """Whose adapters these are, and what they adapt."""
    from riftco.bundle.manifest import strict_json
    from riftco.bundle.reading import verify_files

    settings = strict_json((place / ADAPTER).read_bytes(), str(place / ADAPTER))
    manifest = verify_files(place) if (place / "riftco.json").is_file() else {}
    console.say(f"{place}: adapters{', every digest verified' if manifest else ' that PEFT wrote'}")
    facts = {name: manifest.get(name) for name in ("stage", "artifact_id", "parent_artifact_id")}
    keys = ("r", "lora_alpha", "lora_dropout", "use_rslora", "target_modules", "base_model_name_or_path")
    facts |= {name: settings.get(name) for name in keys}
    for name, value in facts.items():
        if value is not None:
            console.say(f"  {name:<24}{', '.join(value) if isinstance(value, list) else value}")
    return {"kind": "adapter", "path": place, **facts}


def _show_dataset(place: Path, console: Console) -> dict[str, Any]:
    from riftco import data

    manifest = data.open_dataset(place).manifest
    console.say(f"{place}: a dataset of {manifest.dtype} ids below {manifest.vocab_size:,}")
    for name, split in manifest.splits.items():
        console.say(
            f"  {name:<12}{split.tokens:,} tokens, {split.utf8_bytes:,} bytes of text, {len(split.shards)} shards"
        )
    for source in manifest.sources:
        console.say(f"  from {source.path} ({source.bytes:,} bytes, {source.split})")
    console.say("  riftco data check reads every byte of it")
    return {"kind": "dataset", "path": place, **dataclasses.asdict(manifest), "fingerprint": manifest.fingerprint}


def _show_checkpoint(place: Path, console: Console) -> dict[str, Any]:
    """The arrays of one step of an Orbax checkpoint, from its metadata alone."""
    import orbax.checkpoint as ocp

    from riftco.tree import describe, named_leaves

    console.say(f"{place}: a checkpoint of step {place.name}")
    leaves: dict[str, str] = {}
    for item in sorted(path for path in place.iterdir() if (path / "_METADATA").is_file()):
        with ocp.PyTreeCheckpointer() as reader:
            tree = reader.metadata(item.resolve()).item_metadata.tree
        leaves |= {f"{item.name}.{name}": describe(leaf) for name, leaf in named_leaves(tree)}
    for name, text in leaves.items():
        console.say(f"  {name:<60}{text}")
    return {"kind": "checkpoint", "path": place, "step": place.name, "leaves": leaves}


ACTIONS = {
    "": Action(
        InspectOptions, run, "print configuration, leaves, counts, residual bytes, and which tools open it", "model",
        "riftco inspect runs/quickstart/final",
    )
}  # fmt: skip
