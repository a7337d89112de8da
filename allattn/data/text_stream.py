"""Ids back to text, piece by piece, as a model writes them."""

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from allattn.data.vocabulary import EOS


class TextStream:
    """The text of a growing row of ids: `<eos>` ends a line, and a character appears when it is whole."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._eos = tokenizer.token_to_id(EOS)
        self._start_line()

    def add(self, token: int) -> str:
        """The text that this id completes; empty in the middle of a character."""
        if token == self._eos:
            return self.end() + "\n"
        self._line.append(token)
        piece = self._decoder.step(self._tokenizer, token) or ""
        self._shown += len(piece)
        return piece

    def end(self) -> str:
        """What of an incomplete character there is, as U+FFFD; the next id starts a line."""
        rest: str = self._tokenizer.decode(self._line, skip_special_tokens=False)[self._shown :]
        self._start_line()
        return rest

    def _start_line(self) -> None:
        self._line: list[int] = []
        self._shown = 0  # characters of the line that were handed out
        self._decoder = DecodeStream(skip_special_tokens=False)
