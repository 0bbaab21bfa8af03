"""What a bounded cache keeps of the text that it has read: not the ids, but how many tokens were real, and a fingerprint of
the ids. Masks and ids that disagree with it are refused.
"""

import torch
from torch import Tensor

# Two moduli below 2^31, so that every product fits into 64 bits, and a base for each
PRIMES = (2_147_483_647, 2_147_483_629)
BASES = (1_103_515_245, 1_664_525_069)


class ReadText:
    """What has been read of all rows, in the columns that a cache has passed.

    Attributes:
        documents: see [`full_attention_mask`], of all columns.
        real: `[batch]` int64, how many of the columns were no padding; `None` before the first call.
        fingerprint: `[batch, 2]` int64, see [`extend_fingerprint`]; `None` before the first call, and after one without ids.
    """

    def __init__(self):
        self.documents: Tensor | None = None
        self.real: Tensor | None = None
        self.fingerprint: Tensor | None = None

    def extend(self, input_ids: Tensor | None, real: Tensor | None, batch: int, tokens: int, device) -> None:
        """Takes in a call of `[batch, tokens]`.

        Args:
            input_ids: of the call; `None`: embeddings, after which nothing is known of the text's ids.
            real: `[batch, tokens]` bool, which tokens are no padding; `None`: all.
        """
        count = torch.full((batch,), tokens, device=device) if real is None else real.sum(1)
        if input_ids is None or (self.real is not None and self.fingerprint is None):
            self.fingerprint = None
        else:
            self.fingerprint = extend_fingerprint(self.fingerprint, input_ids)
        self.real = count if self.real is None else self.real + count

    def set_ids(self, input_ids: Tensor) -> None:
        """Takes `[batch, columns]` for the ids of what has been read: those of a memory file's text are gone."""
        self.fingerprint = extend_fingerprint(None, input_ids)

    def tensors(self) -> dict[str, Tensor]:
        """What is known, by name, as a memory file has it."""
        known = {"text_real": self.real, "text_fingerprint": self.fingerprint, "documents": self.documents}
        return {name: tensor for name, tensor in known.items() if tensor is not None}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> "ReadText":
        """The inverse of `tensors`; others are passed over."""
        text = cls()
        text.real, text.fingerprint = tensors.get("text_real"), tensors.get("text_fingerprint")
        text.documents = tensors.get("documents")
        return text

    def map_rows(self, function) -> None:
        """Applies a function of rows, such as a choice among them."""
        for name in ("real", "fingerprint", "documents"):
            if getattr(self, name) is not None:
                setattr(self, name, function(getattr(self, name)))

    def begins(self, input_ids: Tensor) -> bool:
        """Whether these ids, `[rows, columns]`, are what has been read; several rows of the cache (beams) may share one."""
        if self.fingerprint is None:
            return False
        repeats = max(1, len(self.fingerprint) // len(input_ids))
        given = extend_fingerprint(None, input_ids).repeat_interleave(repeats, 0)
        return torch.equal(self.fingerprint.to(given.device), given)

    def check_past(self, attention_mask: Tensor) -> None:
        """Refuses a mask `[rows, columns]` of what has been read that has another number of real tokens.

        Raises:
            ValueError: a row has another number; the message has the first row's numbers.
            RuntimeError: a row has another number, in a graph of torch.compile.
        """
        given = (attention_mask != 0).sum(1)
        counted = self._rows(len(attention_mask)).to(given.device)
        if torch.compiler.is_compiling():
            torch._assert_async((given == counted).all(), "the attention_mask disagrees with what the cache has read.")
        elif not torch.equal(given, counted):
            row = int((given != counted).nonzero()[0])
            raise ValueError(
                f"row {row} of attention_mask has {int(given[row])} real tokens (1) among the {attention_mask.shape[1]} "
                f"columns that the cache has passed, but the cache has read {int(counted[row])} of them as real. Give every "
                "call the mask of its tokens: 1 for text, 0 for padding, also behind the end of a row that generate() "
                "finished early. The token that ended such a row is text."
            )

    def mask_before(self, attention_mask: Tensor, columns: int) -> Tensor:
        """`[rows, tokens]` of new tokens, with a mask of what has been read before them: `[rows, columns + tokens]`.

        A row's real tokens are counted and not looked at, so they are put together at the end.
        """
        real = self._rows(len(attention_mask)).to(attention_mask.device)
        past = torch.arange(columns, device=real.device) >= columns - real.unsqueeze(1)
        return torch.cat([past.to(attention_mask), attention_mask], 1)

    def mask_of_ids(self, input_ids: Tensor, attention_mask: Tensor, columns: int) -> Tensor:
        """The mask with which `generate()` reads of these ids what is new, where nobody has said what is.

        It takes ids and a mask of the same width for a whole text and reads only the end of it, what goes beyond the
        cache. So new ids need a wider mask, and which ids are new is seen by what the cache has read.

        Args:
            input_ids: `[batch, tokens]`, of which the cache may have several rows each (beams).
            attention_mask: `[batch, tokens]`; a wider one says what is new, and is returned as it is.
            columns: that the cache has passed.

        Returns:
            The mask itself for a whole text; for ids that are all new, no more of them than the cache has read,
            [`InfiniCache.attention_mask`] of it.

        Raises:
            ValueError: nothing is new in a whole text, the ids are more than the cache has read and begin differently, or
                the mask of what has been read is another.
        """
        tokens = input_ids.shape[1]
        if self.real is None:
            return attention_mask
        if attention_mask.shape[1] != tokens:
            self.check_past(attention_mask[:, :columns])
            return attention_mask
        known = tokens >= columns and self.begins(input_ids[:, :columns])
        if known and tokens == columns:
            raise ValueError(
                f"the cache has read all of these {tokens} ids, and there is nothing to go on from: pass the text with new "
                "ids behind it, or a copy of the cache from before the last of them. If the same ids come a second time, "
                "pass attention_mask=cache.attention_mask(mask), mask being [batch, tokens] with 1 for real tokens."
            )
        if not known and tokens > columns:
            raise ValueError(
                f"these {tokens} ids do not begin with the {columns} that the cache has read, and generate() would take "
                f"them for the whole text and read only the last {tokens - columns}. If all of them are new, pass "
                "attention_mask=cache.attention_mask(mask), mask being [batch, tokens] with 1 for real tokens; a whole text "
                "must be that of the cache token by token, padding included."
            )
        if not known:
            return self.mask_before(attention_mask, columns)
        self.check_past(attention_mask[:, :columns])
        return attention_mask

    def _rows(self, rows: int) -> Tensor:
        """`real` for so many rows, of which each may have several equal ones here (beams)."""
        if self.real is None:
            raise ValueError("nothing has been read yet, of which rows could be chosen.")
        return self.real[:: max(1, len(self.real) // rows)]


def check_rows(what: str, rows: int, cached: int) -> None:
    """ValueError unless `what`, such as "the mask", has as many rows as the cache."""
    if rows != cached:
        raise ValueError(
            f"{what} has {rows} rows and the cache {cached}: repeat the cache's rows with batch_repeat_interleave, or "
            "choose among them with batch_select_indices."
        )


def extend_fingerprint(before: Tensor | None, input_ids: Tensor) -> Tensor:
    """The fingerprint of a longer text: h ← (h · base + id + 1) mod prime for each further id, for two primes.

    In which pieces a text is read does not matter. Two texts of n tokens that were not made for it have the same one with
    a probability of about n · 2^−62.

    Args:
        before: `[batch, 2]` int64, of the text so far; `None`: of none.
        input_ids: `[batch, tokens]`, what follows it, padding included.
    """
    ids, hashes = input_ids.long() + 1, []
    for number, (base, prime) in enumerate(zip(BASES, PRIMES, strict=True)):
        powers = _powers(input_ids.shape[1] + 1, base, prime, ids.device)
        text = (ids % prime * powers[:-1].flip(0) % prime).sum(1)
        hashes.append(text % prime if before is None else (before[:, number].to(ids.device) * powers[-1] + text) % prime)
    return torch.stack(hashes, 1)


def _powers(count: int, base: int, prime: int, device) -> Tensor:
    """base^0 … base^(count − 1) mod prime, `[count]`, by squaring. The squares are numbers of Python's: to bring them to an
    accelerator as a tensor would wait for it."""
    exponents = torch.arange(count, device=device)
    powers = torch.ones_like(exponents)
    # Where a graph leaves the number of tokens open, as many bits as it may have
    for bit in range((count - 1).bit_length() if isinstance(count, int) else 31):
        powers = torch.where(exponents >> bit & 1 == 1, powers * base % prime, powers)
        base = base * base % prime
    return powers
