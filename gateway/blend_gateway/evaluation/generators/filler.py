"""Sentences that mean nothing to any task: varied, seeded, without digits or invented names."""

import random

_WHEN = (
    "In early spring", "On most mornings", "Before the first frost", "After a long rain",
    "Towards evening", "During the harvest", "Late in the year", "On quiet days",
    "When the wind turns", "Shortly after dawn", "In a dry summer", "Between two storms",
)  # fmt: skip
_WHO = (
    "the gardeners", "several visitors", "some old carpenters", "the ferry crew", "two students",
    "the librarians", "a travelling choir", "the night watch", "some of the farmers",
    "a group of painters", "the bakers", "the younger apprentices", "the postal workers",
    "retired teachers",
)  # fmt: skip
_DOES = (
    "gather near", "walk slowly past", "talk about", "take shelter beside", "make drawings of",
    "carry baskets to", "look closely at", "repair parts of", "read aloud beside",
    "clear the snow from", "tell stories about", "hang lanterns along",
)  # fmt: skip
_WHAT = (
    "the stone wall", "the wooden pier", "the orchard gate", "the narrow footbridge",
    "the covered market", "the mill pond", "the chapel steps", "the gravel road",
    "the greenhouse", "the workshop door", "the village green", "the lower meadow",
    "the boat shed", "the town fountain",
)  # fmt: skip
_WHY = (
    "because the light is best there", "although nobody has asked for it",
    "while the kettle comes to the boil", "as their grandparents did",
    "so that the paths stay open", "without hurrying at all", "until the bells are heard",
    "and then share a simple meal", "whenever there is time to spare",
    "even if the clouds look heavy", "and leave before it gets dark", "with great patience",
)  # fmt: skip
_THING = (
    "A good rope", "The usual bread", "Wool from the hills", "A well made chair", "Dried lavender",
    "The oldest song", "A lamp with a clean glass", "The smell of cut hay", "A sharp plane",
    "Fresh paint", "The path along the stream", "A map drawn by hand", "The sound of the organ",
    "A roof of slate",
)  # fmt: skip
_QUALITY = (
    "lasts longer than people expect", "is worth the trouble", "needs care in wet weather",
    "pleases almost everyone", "looks different in winter", "is seldom found in shops",
    "reminds many of their childhood", "improves with the years", "takes a whole day to prepare",
    "has changed little over time", "is the pride of its maker", "costs less than it used to",
)  # fmt: skip
_BUT = (
    "but few would say so", "as anyone who has tried will know", "if it is kept dry",
    "and that is how it should be", "though opinions differ", "according to the almanac",
    "at least in this valley", "which surprises newcomers", "provided that nobody is in a hurry",
    "and the reasons are simple", "so it is handed down with care", "as the proverb has it",
)  # fmt: skip
_TOPIC = (
    "the weather", "the price of timber", "the choice of seeds", "the state of the roads",
    "the evening concert", "the colour of the doors", "the depth of the well",
    "the repair of the nets", "the planting of trees", "the winter timetable",
)  # fmt: skip
_SAID = (
    "was discussed at length", "remained an open question", "was settled over a cup of tea",
    "was mentioned only in passing", "caused a friendly quarrel", "was left to the committee",
    "was soon forgotten", "was written down in the minutes",
)  # fmt: skip
_WHERE = (
    "at the inn", "in the schoolroom", "under the lime trees", "on the way home",
    "in front of the bakery", "behind the sawmill", "in the parish hall", "at the long table",
)  # fmt: skip


class Filler:
    """Writes sentences, none twice.

    Args:
        rng: Decides them.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._written: set[str] = set()

    def sentence(self) -> str:
        """The next one, of 10 to 25 words or so."""
        while True:
            sentence = self._draw()
            if sentence not in self._written:
                self._written.add(sentence)
                return sentence

    def _draw(self) -> str:
        pick = self._rng.choice
        form = self._rng.randrange(4)
        if form == 0:
            return f"{pick(_WHEN)} {pick(_WHO)} {pick(_DOES)} {pick(_WHAT)}, {pick(_WHY)}."
        if form == 1:
            return f"{pick(_THING)} {pick(_QUALITY)}, {pick(_BUT)}."
        if form == 2:
            topic = pick(_TOPIC)
            return f"{topic[0].upper()}{topic[1:]} {pick(_SAID)} {pick(_WHERE)}, {pick(_BUT)}."
        who = pick(_WHO)
        start = f"{who[0].upper()}{who[1:]} {pick(_DOES)} {pick(_WHAT)}"
        return f"{start}, and {pick(_TOPIC)} {pick(_SAID)} {pick(_WHERE)}."
