"""The sentences and words of the task `needle`."""

from dataclasses import dataclass

FORMS = ("words", "numbers")  # of keys and values
ADJECTIVES = (
    "ancient", "bitter", "blue", "bold", "brave", "bright", "calm", "clever", "cold", "dark", "deep", "dry",
    "early", "empty", "gentle", "golden", "green", "heavy", "hidden", "iron", "lonely", "loud", "lucky", "narrow",
    "noble", "old", "pale", "proud", "quiet", "red", "silver", "warm",
)  # fmt: skip
NOUNS = (
    "anchor", "apple", "arrow", "basket", "bell", "bird", "boat", "book", "bridge", "candle", "castle", "chair",
    "cloud", "coin", "crown", "desert", "door", "dragon", "engine", "feather", "field", "flower", "garden", "glass",
    "hammer", "harbor", "horse", "island", "kettle", "ladder", "mirror", "river",
)  # fmt: skip


@dataclass(frozen=True)
class Words:
    """The sentences of a kind, before their names are filled in."""

    description: str
    question: str
    answer: str  # the beginning of the answer


ONE = Words(
    "Magic {noun}s are hidden in the following text. Remember them: a question about them comes after it.\n\n",
    "What is the magic {noun} of {key}?",
    "The magic {noun} of {key} is",
)
SEVERAL = Words(ONE.description, "What are the magic {noun}s of {key}?", "The magic {noun}s of {key} are")
CHAIN = Words(
    "Assignments of variables are hidden in the following text. Remember them: a question about them comes after it."
    "\n\n",
    "Which variables have the value {key}?",
    "The variables with the value {key} are",
)
WORDS = {"single": ONE, "multikey": ONE, "multivalue": SEVERAL, "tracking": CHAIN}
