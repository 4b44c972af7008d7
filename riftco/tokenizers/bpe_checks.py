"""Whether the parts of a byte-pair tokenizer fit together; each function names the first that does not."""

from collections.abc import Mapping, Sequence

from riftco.errors import TokenizerError
from riftco.tokenizers import byte_level
from riftco.tokenizers.added import AddedToken

Merge = tuple[int, int, int]
"""(left id, right id, id of the merged token)."""

MAX_BYTES = 1 << 30
"""All pieces together may hold so many bytes; merges that double each other would otherwise fill the memory."""
_MAX_ID = 2**32 - 2
_ROLES = ("bos", "eos", "pad", "unk")


def require_integer(who: str, name: str, value: object, low: int, high: int = 2**32 - 1) -> int:
    """The value as an int within low..high; TypeError for bool, float and others, TokenizerError for the range."""
    if isinstance(value, (bool, float)) or not hasattr(value, "__index__"):
        raise TypeError(f"{who}: {name} must be an integer; got {type(value).__name__} {value!r}")
    number = int(value.__index__())  # pyright: ignore[reportAttributeAccessIssue]
    if not low <= number <= high:
        raise TokenizerError(f"{who}: {name} must lie in {low}..{high}; got {number}")
    return number


def _triples(merges: Sequence[Sequence[int]]) -> tuple[Merge, ...]:
    triples: list[Merge] = []
    seen: set[tuple[int, int]] = set()
    for rank, merge in enumerate(merges):
        if not isinstance(merge, (tuple, list)) or len(merge) != 3:
            raise TokenizerError(f"BPETokenizer: merge {rank} must be (left, right, id); got {merge!r}")
        left, right, id = (require_integer(f"BPETokenizer: merge {rank}", "an id", part, 0, _MAX_ID) for part in merge)
        if (left, right) in seen:
            raise TokenizerError(f"BPETokenizer: a pair may be merged once; merge {rank} repeats ({left}, {right})")
        seen.add((left, right))
        triples.append((left, right, id))
    return tuple(triples)


def check_merges(merges: Sequence[Sequence[int]]) -> tuple[tuple[Merge, ...], list[bytes | None]]:
    """Merges over the 256 bytes: ids sequential from 256, operands below the id, no pair twice.

    Returns:
        The merges, and the bytes of every id. Sizes are added up before any piece is built.
    """
    triples = _triples(merges)
    sizes = [1] * 256
    total = 256
    for rank, (left, right, id) in enumerate(triples):
        if id != 256 + rank:
            raise TokenizerError(
                f"BPETokenizer: merge ids must be sequential from 256; merge {rank} has {id}, not {256 + rank}"
            )
        if left >= id or right >= id:
            raise TokenizerError(f"BPETokenizer: merge {rank} joins ({left}, {right}); both must be below its id {id}")
        sizes.append(sizes[left] + sizes[right])
        total += sizes[-1]
        if total > MAX_BYTES:
            raise TokenizerError(
                f"BPETokenizer: all pieces together may hold {MAX_BYTES} bytes; merge {rank} reaches {total}"
            )
    pieces: list[bytes] = [bytes([byte]) for byte in range(256)]
    for left, right, _ in triples:
        pieces.append(pieces[left] + pieces[right])
    return triples, list(pieces)


def check_foreign(
    merges: Sequence[Sequence[int]], vocabulary: Mapping[str, int]
) -> tuple[tuple[Merge, ...], list[bytes | None]]:
    """Merges over a given vocabulary: every id is in it, and a merge's string is its operands' strings joined.

    Returns:
        The merges, and the bytes of every id (None where the vocabulary leaves one unused).
    """
    string_of: dict[int, str] = {}
    for string, id in vocabulary.items():
        require_integer("BPETokenizer: vocabulary", repr(string), id, 0, _MAX_ID)
        if id in string_of:
            raise TokenizerError(
                f"BPETokenizer: vocabulary ids must be distinct; {string_of[id]!r} and {string!r} are both {id}"
            )
        string_of[id] = string
    if not string_of:
        raise TokenizerError("BPETokenizer: the vocabulary is empty")
    triples = _triples(merges)
    for rank, (left, right, id) in enumerate(triples):
        for part in (left, right, id):
            if part not in string_of:
                raise TokenizerError(f"BPETokenizer: merge {rank} names id {part}, which the vocabulary lacks")
        if string_of[left] + string_of[right] != string_of[id]:
            raise TokenizerError(
                f"BPETokenizer: merge {rank} joins {string_of[left]!r} and {string_of[right]!r} into another string, "
                f"{string_of[id]!r}"
            )
    size = _bounded_size(string_of)
    return triples, [byte_level.to_bytes(string_of[id]) if id in string_of else None for id in range(size)]


def _bounded_size(ids: Mapping[int, object]) -> int:
    size = max(ids) + 1
    if size > 2 * len(ids) + 65536:
        raise TokenizerError(f"BPETokenizer: {len(ids)} tokens with ids up to {size - 1}; most ids would be unused")
    return size


def check_added(
    pieces: list[bytes | None], added: Sequence[AddedToken], vocabulary: Mapping[str, int] | None
) -> list[bytes | None]:
    """The bytes of every id with the added tokens in place.

    Trained here (`vocabulary` None), added tokens take the ids after the merges in order. In a foreign vocabulary
    they may have any id, if only the string and the id agree with the vocabulary where it has either.
    """
    known = set(pieces) if vocabulary is None else set()
    everything = list(pieces)
    seen: set[str] = set()
    for token in added:
        require_integer(f"BPETokenizer: added token {token.content!r}", "id", token.id, 0, _MAX_ID)
        if token.content in seen:
            raise TokenizerError(f"BPETokenizer: special tokens must be distinct; {token.content!r} comes twice")
        seen.add(token.content)
        content = token.content.encode("utf-8")
        if vocabulary is None:
            if token.id != len(everything):
                raise TokenizerError(
                    f"BPETokenizer: {token.content!r} must have the next id {len(everything)}; got {token.id}"
                )
            if content in known:
                raise TokenizerError(
                    f"BPETokenizer: special token {token.content!r} is also a learned token; choose another text"
                )
            everything.append(content)
            continue
        if vocabulary.get(token.content, token.id) != token.id:
            raise TokenizerError(
                f"BPETokenizer: added token {token.content!r} has id {token.id}, "
                f"but {vocabulary[token.content]} in the vocabulary"
            )
        if token.id > len(everything) + 65536:
            raise TokenizerError(
                f"BPETokenizer: added token {token.content!r} has id {token.id}; most ids would be unused"
            )
        everything += [None] * (token.id + 1 - len(everything))
        if everything[token.id] is not None and token.content not in vocabulary:
            raise TokenizerError(f"BPETokenizer: added token {token.content!r} has id {token.id}, which is taken")
        everything[token.id] = content
    return everything


def check_special_texts(who: str, texts: Sequence[str]) -> list[bytes]:
    """The UTF-8 of distinct, non-empty texts: checked before a long training, not after it."""
    if isinstance(texts, (str, bytes)):
        raise TypeError(f"{who}: special_tokens must be a sequence of texts; got one {type(texts).__name__}")
    contents = [AddedToken(text, 0).content.encode("utf-8") for text in texts]
    for index, content in enumerate(contents):
        if content in contents[:index]:
            raise TokenizerError(f"{who}: special tokens must be distinct; {texts[index]!r} comes twice")
    return contents


def check_roles(roles: Mapping[str, str], added: Sequence[AddedToken]) -> dict[str, str]:
    """The roles as a dict: known names, each an added token's text."""
    contents = {token.content for token in added}
    for role, content in roles.items():
        if role not in _ROLES:
            raise TokenizerError(f"BPETokenizer: roles are {', '.join(_ROLES)}; got {role!r}")
        if content not in contents:
            raise TokenizerError(f"BPETokenizer: role {role!r} must be one of the special tokens; got {content!r}")
    return dict(roles)
