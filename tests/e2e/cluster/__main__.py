"""`python -m cluster up | down | load IMAGE...`: the port for make, on whichever cluster the environment names."""

from __future__ import annotations

import sys

from cluster.choice import choose_cluster
from cluster.port import BedFailed, Unsupported

USAGE = "usage: python -m cluster up | down | load IMAGE..."


def main(argv: list[str]) -> None:
    """Runs one verb; exits with a sentence when it cannot be done."""
    try:
        cluster = choose_cluster()
        match argv:
            case ["up"]:
                cluster.up()
                print(f"export KUBECONFIG={cluster.kubeconfig}")
            case ["down"]:
                cluster.down()
            case ["load", *references] if references:
                cluster.load_image(references)
            case _:
                raise SystemExit(USAGE)
    except Unsupported as cannot:
        print(f"skipped: {cannot}")
    except BedFailed as failed:
        raise SystemExit(f"failed: {failed}") from None


if __name__ == "__main__":
    main(sys.argv[1:])
