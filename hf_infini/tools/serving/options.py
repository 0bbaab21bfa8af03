"""The options of the command `serve`."""

from typing import Annotated

import typer

Host = Annotated[
    str, typer.Option(help="Address; any but this machine's own needs --api-key, or --no-key.")
]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any that is free.")]
ApiKey = Annotated[
    str | None,
    typer.Option(help="Key that requests must have. [default: HF_INFINI_API_KEY, if it is set]"),
]
NoKey = Annotated[bool, typer.Option("--no-key", help="Let everybody ask who reaches the server.")]
Name = Annotated[
    str | None, typer.Option(help="Name of the model in requests. [default: that of its folder]")
]
Slots = Annotated[int, typer.Option(min=1, help="Requests that are answered at once.")]
Queue = Annotated[int, typer.Option(min=0, help="Requests that may wait; more are refused (429).")]
Chunk = Annotated[
    int, typer.Option(min=1, help="Tokens of prompts that are read between two tokens of answers.")
]
MaxTokens = Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")]
MaxPromptTokens = Annotated[
    int | None, typer.Option(min=1, help="Most tokens of a prompt. [default: any number]")
]
MaxMegabytes = Annotated[float, typer.Option(min=0.01, help="Largest request or document.")]
KeptMegabytes = Annotated[
    float,
    typer.Option(
        min=0, help="Memory for what prompts begin with, and for documents, each so much at most."
    ),
]
Timeout = Annotated[float, typer.Option(min=1, help="Seconds after which a request ends.")]
Grace = Annotated[
    float, typer.Option(min=0, help="Seconds that requests have when the server is stopped.")
]
