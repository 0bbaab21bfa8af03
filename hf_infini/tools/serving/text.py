"""The text of an answer while its tokens come."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

HALF = "\ufffd"  # what a tokenizer makes of a part of a character


class AnswerText:
    """Makes text of tokens as they come, up to the stop string that is whole first, which is left
    out; of those that end at the same place, the longest. What [`AnswerText.add`] has given is
    never taken back.

    Args:
        tokenizer: by which the tokens are text; special ones are left out.
        stops: strings at which the answer ends.

    Attributes:
        stopped: whether a stop string has come.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str] = ()):
        self.tokenizer, self.stops, self.stopped = tokenizer, tuple(stops), False
        self._ids: list[int] = []
        # The numbers of the first token that is decoded again, as what comes next may depend on it,
        # and of the first whose text is not known
        self._again, self._unknown = 0, 0
        self._held = ""  # text that may be the beginning of a stop string

    def add(self, token: int) -> str:
        """What is new and certain with one more token, perhaps nothing."""
        self._ids.append(token)
        new = self._new_text()
        if new.endswith(HALF) or not new:
            return ""
        self._again, self._unknown = self._unknown, len(self._ids)
        self._held += new
        return self._certain()

    def end(self) -> str:
        """The rest of the text, where no token follows."""
        if self.stopped:
            return ""
        self._held += self._new_text()
        self._unknown = self._again = len(self._ids)
        certain = self._certain()
        certain, self._held = certain + self._held, ""
        return certain

    def _new_text(self) -> str:
        before, whole = self.tokenizer.batch_decode(
            [self._ids[self._again : stop] for stop in (self._unknown, len(self._ids))],
            skip_special_tokens=True,
            clean_up_tokenization_spaces=False,
        )
        return whole[len(before) :]

    def _certain(self) -> str:
        """Takes from what is held that which no stop string can begin in."""
        found = [
            (place + len(stop), place)
            for stop in self.stops
            if (place := self._held.find(stop)) >= 0
        ]
        if found:
            self.stopped, certain, self._held = True, self._held[: min(found)[1]], ""
            return certain
        kept = max(
            (
                size
                for stop in self.stops
                for size in range(1, len(stop))
                if self._held.endswith(stop[:size])
            ),
            default=0,
        )
        place = len(self._held) - kept
        certain, self._held = self._held[:place], self._held[place:]
        return certain
