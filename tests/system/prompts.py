"""Prompts of the system tests; some repeat themselves, so that n-gram drafts match."""

PROMPTS = (
    "Write the numbers from 1 to 30, separated by commas.",
    "Repeat after me: the quick brown fox jumps over the lazy dog.",
    "What is the capital of France? Answer in one sentence.",
    "List five animals, then list the same five animals again.",
    "Translate into French: The weather is nice today and the weather will be nice tomorrow.",
    "Write a short story about a cat that wants to be a dog.",
    "Summarise: The river rises in the hills. The river runs to the sea. The sea is wide.",
    "What is 12 times 12? Show your steps.",
)
