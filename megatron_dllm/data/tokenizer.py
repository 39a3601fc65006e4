"""One face for the tokenizers that Megatron's flags can name.

Megatron's own wrappers are built for next-token training and lose what a diffusion model needs: the
byte-level one strips trailing white space when it decodes, the SentencePiece one hides `<mask>`, the Hugging
Face one fills in missing special tokens and so changes the tokenizer that is exported with a checkpoint. The
flags, the names and the ids here are Megatron's; the libraries underneath are called directly.

Every tokenizer can be pickled and forked into data-loader workers.
"""

import argparse
import json
import os
import re
from collections.abc import Iterable

SENTENCEPIECE = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
HUGGING_FACE = "HuggingFaceTokenizer"
BYTE_LEVEL = "ByteLevelTokenizer"
NULL = "NullTokenizer"
TOKENIZER_TYPES = (*SENTENCEPIECE, HUGGING_FACE, BYTE_LEVEL, NULL)

_MASK_PIECES = ("<mask>", "[MASK]")


class Tokenizer:
    """Text <-> ids.

    vocab_size                       number of true ids (added tokens included, padding for parallelism not)
    eos_id, pad_id, bos_id, mask_id  int, or None where the tokenizer has no such token
    chat_template                    Jinja source, or None
    hf                               the `transformers` tokenizer underneath, or None
    """

    hf = None

    def __init__(
        self,
        vocab_size: int,
        special: dict[int, str],
        *,
        eos_id: int | None,
        pad_id: int | None,
        bos_id: int | None,
        mask_id: int | None,
        chat_template: str | None,
    ):
        self.vocab_size = vocab_size
        self.eos_id, self.pad_id, self.bos_id, self.mask_id = eos_id, pad_id, bos_id, mask_id
        self.chat_template = chat_template
        self._special = special

    def encode(self, text: str) -> list[int]:
        """Ids of `text` alone: no bos or eos is added."""
        raise NotImplementedError

    def decode(self, ids: Iterable[int], show_special: bool = False) -> str:
        """Text of `ids`; special tokens are left out, or written by name with `show_special`.

        Raises ValueError for an id outside the vocabulary.
        """
        ids = [int(i) for i in ids]
        outside = next((i for i in ids if not 0 <= i < self.vocab_size), None)
        if outside is not None:
            raise ValueError(
                f"Cannot decode id {outside}: the tokenizer has {self.vocab_size} ids; "
                "mask padded vocabulary entries before sampling."
            )
        return self._decode(ids, show_special)

    def special_text(self, id: int) -> str:
        """The name of a special token, such as "<eos>". Raises ValueError if `id` is not one."""
        if id not in self._special:
            raise ValueError(
                f"Id {id} is not a special token; this tokenizer's special ids are {sorted(self._special)}."
            )
        return self._special[id]

    def is_special(self, id: int) -> bool:
        return id in self._special

    def piece(self, id: int) -> str:
        """What one token adds to a text, white space included; the name of a special token.

        A byte that is no character by itself is a surrogate, so that joined pieces become text again with
        `.encode("utf-8", "surrogateescape").decode("utf-8", "replace")`.
        Raises ValueError for an id outside the vocabulary.
        """
        self.decode([id])  # checks it
        return self._special[id] if id in self._special else self._piece(id)

    def _piece(self, id: int) -> str:
        return self._decode_plain([id])

    def _decode(self, ids: list[int], show_special: bool) -> str:
        if not show_special:
            return self._decode_plain([i for i in ids if i not in self._special])
        text, run = "", []
        for i in ids:  # special tokens part the text into runs that were encoded on their own
            if i in self._special:
                text += self._decode_plain(run) + self._special[i]
                run = []
            else:
                run.append(i)
        return text + self._decode_plain(run)

    def _decode_plain(self, ids: list[int]) -> str:
        raise NotImplementedError


class SentencePiece(Tokenizer):
    """A SentencePiece model file; `decode(encode(x)) == x` where the model itself keeps white space."""

    def __init__(self, path: str, chat_template: str | None = None):
        from sentencepiece import SentencePieceProcessor

        try:
            model = SentencePieceProcessor(model_file=path)
        except (RuntimeError, OSError) as error:
            raise ValueError(f"{path} is not a SentencePiece model: {error}.") from error
        self._model = model
        eos_id, pad_id, bos_id = (i if i >= 0 else None for i in (model.eos_id(), model.pad_id(), model.bos_id()))
        mask_id = None
        for piece in _MASK_PIECES:  # piece_to_id answers the id of <unk> for what it does not know
            if mask_id is None and model.id_to_piece(model.piece_to_id(piece)) == piece:
                mask_id = model.piece_to_id(piece)
        special = {i: model.id_to_piece(i) for i in range(model.get_piece_size()) if model.is_control(i)}
        special |= {i: model.id_to_piece(i) for i in (eos_id, pad_id, bos_id, mask_id) if i is not None}
        super().__init__(
            model.get_piece_size(),
            special,
            eos_id=eos_id,
            pad_id=pad_id,
            bos_id=bos_id,
            mask_id=mask_id,
            chat_template=chat_template,
        )

    def encode(self, text: str) -> list[int]:
        return self._model.encode(text)

    def _piece(self, id: int) -> str:
        piece = self._model.id_to_piece(id)
        return _bytes_text([int(piece[3:-1], 16)]) if self._model.is_byte(id) else piece.replace("\u2581", " ")

    def _decode_plain(self, ids: list[int]) -> str:
        return self._model.decode(ids)


class HuggingFace(Tokenizer):
    """A local folder that `transformers.AutoTokenizer` can load."""

    def __init__(self, folder: str, chat_template: str | None = None, fast: bool = True, trust: bool = False):
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        # AutoTokenizer prefers some models' usual class to the folder's word, and then reads another vocabulary's text.
        loader = PreTrainedTokenizerFast if _is_generic(folder) else AutoTokenizer
        try:
            hf = loader.from_pretrained(folder, local_files_only=True, use_fast=fast, trust_remote_code=trust)
        except Exception as error:  # transformers raises anything from OSError to KeyError
            reason = str(error).strip().splitlines() or [type(error).__name__]
            if "trust_remote_code" in str(error):
                raise ValueError(
                    f"the tokenizer in {folder} is Python code of its own, which is not run unasked: read it, then "
                    "allow it with --trust-remote-code."
                ) from error
            raise ValueError(
                f"transformers cannot load a tokenizer from {folder} ({reason[0]}); "
                "point --tokenizer-model at a folder with its tokenizer files."
            ) from error
        if chat_template is not None:
            hf.chat_template = chat_template
        template = hf.chat_template
        if isinstance(template, dict):  # several named templates
            template = template.get("default")
        self.hf = hf
        # Ids may have holes, in which case len() is smaller than what the embedding needs.
        vocab_size = max(len(hf), max(hf.get_vocab().values()) + 1)
        super().__init__(
            vocab_size,
            {i: hf.convert_ids_to_tokens(i) for i in hf.all_special_ids},
            eos_id=hf.eos_token_id,
            pad_id=hf.pad_token_id,
            bos_id=hf.bos_token_id,
            mask_id=hf.mask_token_id,
            chat_template=template,
        )

    def encode(self, text: str) -> list[int]:
        return self.hf(text, add_special_tokens=False, verbose=False)["input_ids"]

    def _piece(self, id: int) -> str:
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        name = self.hf.convert_ids_to_tokens(id) or f"<{id}>"  # ids may have holes
        if name in self.hf.get_added_vocab():
            return name
        before = self.encode("a")[-1:]  # the beginning of a text loses its space
        alone, text = self._decode(before, True), self._decode([*before, id], True)
        if not text.startswith(alone):
            return self._decode([id], True)
        text = text[len(alone) :]
        if "\N{REPLACEMENT CHARACTER}" not in text:
            return text
        if re.fullmatch("<0x[0-9A-F]{2}>", name):
            return _bytes_text([int(name[3:-1], 16)])
        byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
        return _bytes_text([byte_of[c] for c in name]) if set(name) <= set(byte_of) else name

    def _decode(self, ids: list[int], show_special: bool) -> str:
        return self.hf.decode(ids, skip_special_tokens=not show_special, clean_up_tokenization_spaces=False)


def _is_generic(folder: str) -> bool:
    """Whether the folder says that its tokenizer.json is all there is to its tokenizer."""
    try:
        with open(os.path.join(folder, "tokenizer_config.json"), encoding="utf-8") as file:
            name = json.load(file).get("tokenizer_class")
    except (OSError, ValueError, AttributeError):
        return False
    known = ("TokenizersBackend", "PreTrainedTokenizerFast")
    return name in known and os.path.isfile(os.path.join(folder, "tokenizer.json"))


class ByteLevel(Tokenizer):
    """UTF-8 bytes 0..255, then <pad> 256, <eos> 257, <mask> 258: needs no file and loses nothing."""

    def __init__(self, chat_template: str | None = None):
        super().__init__(
            259,
            {256: "<pad>", 257: "<eos>", 258: "<mask>"},
            eos_id=257,
            pad_id=256,
            bos_id=None,
            mask_id=258,
            chat_template=chat_template,
        )

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def _piece(self, id: int) -> str:
        return _bytes_text([id])

    def _decode_plain(self, ids: list[int]) -> str:
        # A half-trained model writes broken UTF-8: show that (U+FFFD) rather than drop it.
        return bytes(ids).decode("utf-8", errors="replace")


class Null(Tokenizer):
    """Text that already is ids, written in decimal and parted by white space."""

    def __init__(self, vocab_size: int, eos_id: int | None = None, pad_id: int | None = None):
        eos_id = vocab_size - 1 if eos_id is None else eos_id
        pad_id = None if pad_id is None or pad_id < 0 else pad_id
        special = {i: str(i) for i in (eos_id, pad_id) if i is not None}
        super().__init__(
            vocab_size, special, eos_id=eos_id, pad_id=pad_id, bos_id=None, mask_id=None, chat_template=None
        )

    def encode(self, text: str) -> list[int]:
        try:
            ids = [int(word) for word in text.split()]
        except ValueError as error:
            raise ValueError(f"{NULL} reads decimal ids parted by spaces only: {error}.") from error
        outside = next((i for i in ids if not 0 <= i < self.vocab_size), None)
        if outside is not None:
            raise ValueError(f"Id {outside} is outside --vocab-size {self.vocab_size}; raise it.")
        return ids

    def piece(self, id: int) -> str:
        return f"{self.decode([id], show_special=True)} "

    def _decode(self, ids: list[int], show_special: bool) -> str:
        return " ".join(str(i) for i in ids if show_special or i not in self._special)


def _bytes_text(values: list[int]) -> str:
    return bytes(values).decode("utf-8", "surrogateescape")


def build_tokenizer(args: argparse.Namespace) -> Tokenizer:
    """The tokenizer that Megatron's flags describe.

    Reads tokenizer_type, tokenizer_model, chat_template (a Jinja file), vocab_size, null_tokenizer_eod_id,
    null_tokenizer_pad_id, tokenizer_hf_no_use_fast, trust_remote_code; all but the type may be absent.
    Raises ValueError if the type is unknown, its files are missing, or a flag would have no effect.
    """
    kind = getattr(args, "tokenizer_type", None)
    template = _read_template(getattr(args, "chat_template", None))
    if getattr(args, "special_tokens", None) or getattr(args, "tokenizer_sentencepiece_legacy", False):
        raise ValueError(
            "--tokenizer-special-tokens and --tokenizer-sentencepiece-legacy are not supported; "
            "add special tokens to the tokenizer's own files."
        )
    if kind in SENTENCEPIECE:
        return SentencePiece(_existing(args, kind, os.path.isfile, "SentencePiece .model file"), template)
    if kind == HUGGING_FACE:
        return HuggingFace(
            _existing(args, kind, os.path.isdir, "folder"),
            template,
            fast=not getattr(args, "tokenizer_hf_no_use_fast", False),
            trust=getattr(args, "trust_remote_code", False),
        )
    if kind == BYTE_LEVEL:
        return ByteLevel(template)
    if kind == NULL:
        if not getattr(args, "vocab_size", None):
            raise ValueError(f"--tokenizer-type {NULL} has no vocabulary of its own; give --vocab-size.")
        return Null(
            args.vocab_size,
            getattr(args, "null_tokenizer_eod_id", None),
            getattr(args, "null_tokenizer_pad_id", None),
        )
    if kind is None:
        raise ValueError(
            "there is no tokenizer: give --tokenizer-model, and --tokenizer-type, for which choose one of "
            f"{', '.join(TOKENIZER_TYPES)}."
        )
    raise ValueError(f"--tokenizer-type {kind} is not supported; choose one of {', '.join(TOKENIZER_TYPES)}.")


def _existing(args: argparse.Namespace, kind: str, exists, what: str) -> str:
    path = getattr(args, "tokenizer_model", None)
    if not path:
        raise ValueError(f"--tokenizer-type {kind} needs --tokenizer-model, the path of a {what}.")
    if not exists(path):
        raise ValueError(f"--tokenizer-model {path} is not an existing {what}; correct the path.")
    return path


def _read_template(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--chat-template takes the path of a Jinja file; cannot read {path!r}.") from error
