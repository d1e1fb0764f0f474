"""`outrider demo`: what there is to see in a minute, against services that are up.

One question, answered with speculation and without: the figures differ, the text does not.
"""

import sys
from dataclasses import replace

from outrider.cli.chat import Answer, ChatOptions, stream_answer
from outrider.cli.completion import drafts_total, open_client, served_model

# The kind of request that n-gram drafts are good at: much of the answer stands in the prompt.
QUESTION = (
    "Summarise this text in two sentences: The Moon is Earth's only natural satellite. It orbits "
    "the Earth at an average distance of 384,400 kilometres and always shows the same side to us. "
    "Its gravity causes the tides of the oceans."
)
MAX_TOKENS = 96
SEED = 1


async def show(url: str) -> int:
    """Prints both answers and their figures; 1 if the texts differ. Raises ServerError."""
    async with open_client(url) as client:
        model = await served_model(client)

        async def ask(*, speculates: bool) -> Answer:
            options = ChatOptions(
                temperature=0.0, seed=SEED, max_tokens=MAX_TOKENS, speculates=speculates
            )
            return await stream_answer(
                client, model, [{"role": "user", "content": QUESTION}], options
            )

        print(f"\nready {url}  ({model})\n\n{QUESTION}\n\nwith speculation:", flush=True)
        before = await drafts_total(client)
        fast = await ask(speculates=True)
        # Nobody else asks here, so all drafts since are this answer's.
        drafts = await drafts_total(client) - before
        print(
            f"[{replace(fast.figures, drafts=drafts).words()}]\n\nwithout speculation:", flush=True
        )
        plain = await ask(speculates=False)
        print(f"[{plain.figures.words()}]\n", flush=True)
    if fast.text != plain.text:
        print("outrider demo: the two texts differ", file=sys.stderr)
        return 1
    print("The text is the same with and without speculation.", flush=True)
    return 0
