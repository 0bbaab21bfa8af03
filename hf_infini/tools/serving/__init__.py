"""Many requests at once: each is a row of one cache, whose rows come and go between steps, because
a state of constant size has a place before its text is known. From the bottom up: `text` and
`requests`, `prefixes` and `rows`, the `loop`, its thread (`engine`), what is asked (`prompts`,
`library`), and the server (`api`, `server`)."""
