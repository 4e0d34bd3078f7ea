"""A model folder's tokenizer, reduced to what training needs: exact ids, exact text, and which ids end a turn.

Two things make text and ids of a conversation differ from text and ids of a lone string. A tokenizer may put a space before
the first word of whatever it encodes, and a decoder may strip one from whatever it decodes. So both directions can be told
that something stands before: `encode(text, after=id)` and `decode(ids, continued=True)`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import tokenizers
import tokenizers.models

from polyturn.errors import ModelError
from polyturn.rendering.folder import TokenizerFiles

TEXT_ANCHORS = (".", "a", "\n", "0")
"""Ordinary text that may stand before a delta to learn its ids there; the first that merges with nothing is used."""
UNKNOWN_TOKENS = ("<unk>", "[UNK]")


MOST_OPENINGS = 256
"""Texts that start a context whose ids are kept: siblings open with the same one, one after the other."""


class Tokenizer:
    """Text to ids and back. Adds no special token of its own, recognises those in the text, keeps them when decoding.

    `eos_ids` are the ids that the model folder says end a generation; `special_tokens` are the control tokens by name.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_ids: Sequence[int],
        bos_token: str | None = None,
        eos_token: str | None = None,
        pad_token: str | None = None,
        chat_template: str | None = None,
    ) -> None:
        self.backend = backend
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = False
        named = [token for token in (bos_token, eos_token, pad_token) if token is not None]
        # A named token that is only in the vocabulary would not be recognised inside text; its id stays what it is.
        added = {token.content for token in backend.get_added_tokens_decoder().values()}
        backend.add_special_tokens([name for name in named if name not in added and backend.token_to_id(name) is not None])
        self.eos_ids = tuple(dict.fromkeys(eos_ids))
        self.bos_token = bos_token
        self.eos_token = eos_token
        self.pad_token = pad_token
        self.chat_template = chat_template
        self._added = {token_id: token.content for token_id, token in backend.get_added_tokens_decoder().items()}
        self.special_tokens: Mapping[str, int] = self._control_tokens()
        if not self.special_tokens:
            raise ModelError("the tokenizer has no special token, so no token can end a turn; add one to tokenizer.json")
        self._anchor, self._anchor_text = self._neutral_anchor()
        self._openings: dict[str, tuple[int, ...]] = {}

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """The tokenizer of a model folder. Raises ModelError naming the file and the missing piece."""
        files = TokenizerFiles.read(Path(folder))
        return cls(
            files.backend,
            eos_ids=files.eos_ids,
            bos_token=files.bos_token,
            eos_token=files.eos_token,
            pad_token=files.pad_token,
            chat_template=files.chat_template,
        )

    def encode(self, text: str, *, after: int | None = None) -> tuple[int, ...]:
        """Ids of `text`, which starts a context, or stands right after the token `after` of one."""
        if after is None or not text:
            known = self._openings.get(text)
            if known is None:
                if len(self._openings) == MOST_OPENINGS:
                    self._openings.clear()
                known = self._openings[text] = tuple(self._encode(text).ids)
            return known
        if after in self._added:
            ids = self._encode(self._added[after] + text).ids
            if ids[:1] == [after]:
                return tuple(ids[1:])
        return self._encode_after_text(text)

    def decode(self, ids: Sequence[int], *, continued: bool = False) -> str:
        """Text of `ids`, special tokens included. With `continued` they don't start the context: no first space is lost.

        Bytes that are not whole characters become replacement characters, and ids without a token nothing.
        """
        if not continued:
            return self.backend.decode(list(ids), skip_special_tokens=False)
        text = self.backend.decode([self._anchor, *ids], skip_special_tokens=False)
        return text[len(self._anchor_text) :]

    def token(self, token_id: int) -> str:
        """The text of one token inside a context, empty for an id without a token."""
        return self.decode((token_id,), continued=True)

    def token_id(self, token: str) -> int | None:
        """The id of a token by its name in the vocabulary."""
        return self.backend.token_to_id(token)

    @property
    def pad_id(self) -> int | None:
        """The id of the padding token, where the folder names one."""
        return None if self.pad_token is None else self.token_id(self.pad_token)

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return 1 + max(self.backend.get_vocab(with_added_tokens=True).values())

    @property
    def added_tokens(self) -> Mapping[str, int]:
        """Every token that is found in a text before anything else is cut, special or not."""
        return {token: token_id for token_id, token in self._added.items()}

    def matches_normalized(self, ids: Collection[int]) -> bool:
        """Whether one of these added tokens also matches text that only normalises to its name."""
        added = self.backend.get_added_tokens_decoder()
        return self.backend.normalizer is not None and any(added[i].normalized for i in ids if i in added)

    def spans(self, text: str, ids: Collection[int]) -> list[tuple[int, int]]:
        """Start and end in `text` of everything that encodes to one of these ids, in order."""
        encoding = self._encode(text)
        return [span for token_id, span in zip(encoding.ids, encoding.offsets, strict=True) if token_id in ids]

    def _control_tokens(self) -> dict[str, int]:
        """Special tokens and whatever ends a generation, without the unknown token: any odd character encodes to that."""
        added = self.backend.get_added_tokens_decoder()
        unknown = {*UNKNOWN_TOKENS, getattr(self.backend.model, "unk_token", None)}
        tokens = {
            token.content: token_id
            for token_id, token in sorted(added.items())
            if token.special and token.content not in unknown
        }
        for token_id in self.eos_ids:
            token = self.backend.id_to_token(token_id)
            if token is not None:
                tokens[token] = token_id
        return tokens

    def _neutral_anchor(self) -> tuple[int, str]:
        """A special token to stand before other text, one that swallows no white space where there is one."""
        added = self.backend.get_added_tokens_decoder()
        plain = [i for i in self.special_tokens.values() if i in added and not added[i].lstrip and not added[i].rstrip]
        anchor = (plain or list(self.special_tokens.values()))[0]
        return anchor, self.decode((anchor,))

    def _encode(self, text: str) -> tokenizers.Encoding:
        try:
            return self.backend.encode(text, add_special_tokens=False)
        except TypeError as error:  # half a surrogate pair
            raise ModelError(f"{text[:80]!r} is not valid Unicode text: {error}; replace what can't be encoded") from error
        except Exception as error:  # the library raises nothing narrower
            word = next(self._unknown_words(text), None)
            if word is None:
                raise ModelError(f"the tokenizer can't encode {text[:80]!r}: {error}; check its tokenizer.json") from error
            raise ModelError(
                f"the word {word!r} is not in the tokenizer's vocabulary, which has no unknown token; "
                "use the words of the environment's vocabulary, or a model with an open one"
            ) from error

    def _encode_after_text(self, text: str) -> tuple[int, ...]:
        """Ids of `text` after an ordinary token, whatever the tokenizer does at the start of a text."""
        candidates: list[tuple[int, ...]] = []
        for anchor in (self._anchor_text, *TEXT_ANCHORS):
            try:
                head, ids = self._encode(anchor).ids, self._encode(anchor + text).ids
            except ModelError:
                if anchor == self._anchor_text:
                    raise
                continue  # a closed vocabulary without this anchor
            if ids[: len(head)] == head:
                candidates.append(tuple(ids[len(head) :]))
                if self.decode(candidates[-1], continued=True) == text:
                    return candidates[-1]
        # A tokenizer that can't give this text back at all: what it does after a special token is what it was trained on.
        return candidates[0] if candidates else tuple(self._encode(text).ids)

    def _unknown_words(self, text: str) -> Iterator[str]:
        """The pieces of a text that a vocabulary of whole words doesn't have; other models build pieces from parts."""
        if not isinstance(self.backend.model, tokenizers.models.WordLevel):
            return
        added = "|".join(re.escape(token) for token in sorted(self._added.values(), key=len, reverse=True))
        for segment in re.split(added, text):
            if self.backend.normalizer is not None:
                segment = self.backend.normalizer.normalize_str(segment)
            cut = self.backend.pre_tokenizer
            pieces = [segment] if cut is None else [piece for piece, _ in cut.pre_tokenize_str(segment)]
            yield from (piece for piece in pieces if self.backend.token_to_id(piece) is None)
