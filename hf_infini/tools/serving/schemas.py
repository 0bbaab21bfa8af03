"""What the server takes, as OpenAI's API has it."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from ..reader import COLDEST, HOTTEST

# Of what is not supported, the values that change nothing; of what says nothing about an answer,
# any (`None`)
NEUTRAL: dict[str, tuple | None] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False, 0),
    "top_logprobs": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "parallel_tool_calls": None,
    "metadata": None,
    "user": None,
    "safety_identifier": None,
    "store": None,
    "service_tier": None,
}


class Part(BaseModel):
    """A part of a message."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["text"]
    text: str


class Message(BaseModel):
    """A turn of a chat."""

    model_config = ConfigDict(extra="ignore")  # what a reply had beside its text
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part]

    def turn(self) -> dict[str, str]:
        """As a template takes it."""
        role = "system" if self.role == "developer" else self.role
        content = self.content
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        return {"role": role, "content": text}


class StreamOptions(BaseModel):
    """What a stream has beside the text."""

    model_config = ConfigDict(extra="forbid")
    include_usage: bool = False


Stop = Annotated[str, Field(min_length=1, max_length=200)]


class Asked(BaseModel):
    """What chats and texts have in common."""

    model_config = ConfigDict(extra="forbid")
    model: str
    temperature: float | None = Field(None, ge=0, le=HOTTEST)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.1, le=10)
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    max_tokens: int | None = Field(None, ge=1)
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def only_what_is_supported(cls, given: Any) -> Any:
        """Leaves out of what was `given` that which changes nothing; ValueError for the rest of
        what is not supported."""
        if not isinstance(given, dict):
            return given
        for name, values in NEUTRAL.items():
            value = given.get(name)
            if value is not None and values is not None and value not in values:
                raise ValueError(
                    f"{name}={value!r:.100} is not supported: leave it out, or give {values[0]!r}."
                )
        return {name: value for name, value in given.items() if name not in NEUTRAL}

    @field_validator("temperature")
    @classmethod
    def warm(cls, given: float | None) -> float | None:
        """ValueError for a temperature, `given`, at which logits are no numbers."""
        if given and given < COLDEST:
            raise ValueError(f"give 0, for the likeliest tokens, or {COLDEST} at least.")
        return given

    @property
    def stops(self) -> tuple[str, ...]:
        """All strings at which the answer ends."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def options(self) -> dict[str, Any]:
        """As `generate` takes them; what was not given is the model's."""
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        found = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.temperature == 0:
            del found["temperature"]
            found["do_sample"] = False
        elif found.keys() - {"repetition_penalty"}:
            found["do_sample"] = True
        if self.logit_bias:
            found["sequence_bias"] = [[[token], bias] for token, bias in self.logit_bias.items()]
        return found


class Chat(Asked):
    """A chat, perhaps about documents."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: int | None = Field(None, ge=1)
    document: str | Annotated[list[str], Field(max_length=100)] | None = None

    @model_validator(mode="after")
    def one_limit(self) -> "Chat":
        """Takes either name of the limit; ValueError for both."""
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("give either max_completion_tokens or max_tokens.")
        self.max_tokens = self.max_tokens or self.max_completion_tokens
        return self

    @property
    def documents(self) -> list[str]:
        """The ids of all documents, each once."""
        given = [self.document] if isinstance(self.document, str) else self.document or []
        return [*dict.fromkeys(given)]


class Completion(Asked):
    """A text that goes on."""

    prompt: str | list[int] | Annotated[list[str | list[int]], Field(min_length=1, max_length=1)]

    @property
    def text(self) -> str | list[int]:
        """The prompt, or its ids."""
        given: Any = self.prompt
        one = isinstance(given, str) or all(isinstance(part, int) for part in given)
        return given if one else given[0]
