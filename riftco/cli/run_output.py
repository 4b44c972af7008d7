"""What a run directory gets beside what the trainer writes: config.yaml as flags, the bundle, samples, the report."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from riftco.cli.console import Console
from riftco.cli.corpus import Corpus
from riftco.errors import ConfigError, RiftcoError, TokenizerError
from riftco.files import json_lines, replace_file

_SAMPLE_TOKENS = 160


def resolved(options: Any, config: Any = None) -> dict[str, Any]:
    """Every option as it was understood, by flag name; as a --config file it means the same run again.

    Args:
        options: the verb's options.
        config: the `DecoderConfig` that its model flags came to, where it has such.
    """
    skipped = ("config", "json", "force", "resume")
    values = {f.name: getattr(options, f.name) for f in dataclasses.fields(options) if f.name not in skipped}
    shape = {} if config is None else config.to_dict()
    model = {("max_seq_length" if k == "context" else k): v for k, v in shape.items()}
    values |= {name: value for name, value in model.items() if name in values}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def as_yaml(values: dict[str, Any]) -> str:
    """The text of config.yaml."""
    import yaml

    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def write_config(directory: Path, values: dict[str, Any]) -> None:
    """Put the flags beside the trainer's own view of them."""
    replace(directory / "config.yaml", as_yaml(values))


def check_prompts(prompts: list[str], tokenizer: Any) -> None:
    """Refuse a prompt that the tokenizer has no ids for, before it has cost a training run.

    Raises:
        ConfigError: as said.
    """
    from riftco.cli import generate

    for prompt in prompts:
        try:
            generate.prompt_ids(prompt, tokenizer)
        except TokenizerError as error:
            raise ConfigError(f"--prompt must be text that the tokenizer can encode; {error}") from error


def finish(
    result: Any,
    config: Any,
    text: Corpus,
    console: Console,
    *,
    prompts: list[str],
    seed: int,
    generation: dict[str, Any] | None = None,
    stop: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Bundle, samples and report of a finished run: all of a new one, of an old one what is missing.

    Args:
        result: the `TrainResult`.
        config: its decoder.
        text: its corpus.
        console: where the samples are shown.
        prompts: what the samples begin with.
        seed: the run's.
        generation: sampling defaults that the bundle recommends.
        stop: texts that end a sample.

    Returns:
        The summary of the run.
    """
    from riftco import bundle
    from riftco.cli import models
    from riftco.report import write_report

    place = Path(result.directory)
    final = place / "final"
    is_new = result.reason != "already_finished"
    has_bundle, has_samples, has_report = (
        not is_new and (place / name).is_file() for name in (f"final/{bundle.MANIFEST}", "samples.jsonl", "report.html")
    )
    if not has_bundle:
        fingerprints = {"data": text.facts, "training": {"steps": result.step, "seed": seed}}
        bundle.save(
            final,
            result.params,
            config,
            text.tokenizer,
            fingerprints=fingerprints,
            generation=generation,
            force=final.exists(),
        )
    if has_samples:
        samples = read_samples(place)
    else:
        model = models.load(str(final))
        samples = [sample(model, prompt, result.step, seed + index, stop) for index, prompt in enumerate(prompts)]
        replace(place / "samples.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in samples))
    if not (has_samples and has_report):
        write_report(place)
    if has_bundle and has_samples and has_report:
        console.note(f"{place} is finished; nothing was changed")
    for row in samples:
        console.say(f"\n{row['prompt']}{row['text']}")
    console.say()
    last = result.validation
    return {
        "out_dir": place,
        "steps": result.step,
        "reason": result.reason,
        "seconds": result.seconds,
        "loss": None if last is None else last.loss,
        "perplexity": None if last is None else last.perplexity,
        "bits_per_byte": None if last is None else last.bits_per_byte,
        "best_step": result.best.step,
        "bundle": final,
        "report": place / "report.html",
        "samples": [row["text"] for row in samples],
    }


def sample(model: Any, prompt: str, step: int, seed: int, stop: tuple[str, ...] = ()) -> dict[str, Any]:
    """One continuation by the saved bundle, as a line of samples.jsonl; `riftco generate` repeats it."""
    from riftco.cli import generate

    settings = {"temperature": 0.8, "top_k": 40, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    settings |= {name: value for name, value in model.generation.items() if name in settings}
    drawn: list[int] = []
    ids = generate.prompt_ids(prompt, model.tokenizer)[: model.config.context]
    text = "".join(generate.write(model, ids, _SAMPLE_TOKENS, settings, seed, stop, drawn))
    return {"step": step, "prompt": prompt, "text": text, "seed": seed, **settings}


def read_samples(place: Path) -> list[dict[str, Any]]:
    """The rows of samples.jsonl; none where there is no such file."""
    return [line.record for line in json_lines(place / "samples.jsonl") if line.record is not None]


def opening(text: Corpus) -> str:
    """The first few words of the held-out text, or of the training text."""
    tokens = text.train if text.validation is None else text.validation
    ids = tokens.read(0, 16) if hasattr(tokens, "read") else tokens[:16]
    words = text.tokenizer.decode([int(token) for token in ids]).strip().split(" ")
    return " ".join(words[:4]) or "\n"


def replace(path: Path, content: str) -> None:
    """Put a file of the run in place, in one step."""
    try:
        replace_file(path, content)
    except OSError as error:
        raise RiftcoError(f"--out-dir: {path} cannot be written: {error.strerror or error}") from error
