"""Text to batches: files, splits, shards, windows, sources, held-out walks; examples; generated corpora. NumPy only."""

from riftco.data.compositions import generate_compositions
from riftco.data.conversations import (
    Example,
    ExampleFile,
    Preference,
    find_examples,
    load_examples,
    read_examples,
)
from riftco.data.corpus import SourceFile, TextSplit, find_splits, load_texts
from riftco.data.encoding import encode_text, token_byte_lengths
from riftco.data.example_batches import (
    ExampleWindows,
    PackedExampleSource,
    PaddedExampleSource,
    PreferenceSource,
    PreferenceWindows,
)
from riftco.data.generate import generate_instructions, generate_stories
from riftco.data.held_out import EvaluationWindows, evaluation_windows
from riftco.data.jsonl import iterate_row_texts, iterate_rows, read_instructions
from riftco.data.manifest import Manifest, Shard, Split
from riftco.data.parity import ExampleWindowBatchSource, RandomWindowBatchSource, SequenceWindowBatchSource
from riftco.data.preparation import CheckReport, check, prepare, show
from riftco.data.sft import Encoded, EncodedSet, EncodingReport, encode_example, encode_examples, encode_preferences
from riftco.data.shards import Dataset, open_dataset
from riftco.data.sources import Source, UniformWindowSource, fixed_batches
from riftco.data.splits import ExampleSplits, read_splits, split_examples
from riftco.data.text import expand_paths, file_sha256, iterate_text, read_text, refuse_identical_texts, split_text
from riftco.data.tokens import Tokens
from riftco.data.windows import Batch

__all__ = [
    "Batch",
    "CheckReport",
    "Dataset",
    "Encoded",
    "EncodedSet",
    "EncodingReport",
    "EvaluationWindows",
    "Example",
    "ExampleFile",
    "ExampleSplits",
    "ExampleWindowBatchSource",
    "ExampleWindows",
    "Manifest",
    "PackedExampleSource",
    "PaddedExampleSource",
    "Preference",
    "PreferenceSource",
    "PreferenceWindows",
    "RandomWindowBatchSource",
    "SequenceWindowBatchSource",
    "Shard",
    "Source",
    "SourceFile",
    "Split",
    "TextSplit",
    "Tokens",
    "UniformWindowSource",
    "check",
    "encode_example",
    "encode_examples",
    "encode_preferences",
    "encode_text",
    "evaluation_windows",
    "expand_paths",
    "file_sha256",
    "find_examples",
    "find_splits",
    "fixed_batches",
    "generate_compositions",
    "generate_instructions",
    "generate_stories",
    "iterate_row_texts",
    "iterate_rows",
    "iterate_text",
    "load_examples",
    "load_texts",
    "open_dataset",
    "prepare",
    "read_examples",
    "read_instructions",
    "read_splits",
    "read_text",
    "refuse_identical_texts",
    "show",
    "split_examples",
    "split_text",
    "token_byte_lengths",
]
