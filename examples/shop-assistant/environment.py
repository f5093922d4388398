"""The shop, which the policy asks by ending a turn with `?fig`, and which answers `=c;` and then lets it go on."""

import re

QUESTION = re.compile(r"\?([a-z]+)\Z")


class Shop:
    """Answers one question per turn, where a thing lies or what a shelf costs; a turn without one is the last."""

    async def run(self, sample, generate):
        """Plays one episode; what the shop does not have is answered with `-`."""
        while question := QUESTION.search(sample.response):
            answer = sample.metadata["shop"].get(question[1], "-")
            sample = await generate(f"={answer};")
