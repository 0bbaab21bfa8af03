"""Prints the path of one downloaded Carolina shard (2 MB of Portuguese wiki pages), for recipes/quickstart.sh.

Ends with status 1 and a note when the Hugging Face Hub does not answer within 5 seconds.
"""

import argparse
import sys
from urllib.request import urlopen

REPOSITORY = "carolina-c4ai/corpus-carolina"
FILES = ("corpus/wikis/checksum.sha256", "corpus/wikis/pt/WIKd.xml.gz")


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    from huggingface_hub import constants, hf_hub_download

    try:
        if not constants.HF_HUB_OFFLINE:
            urlopen(constants.ENDPOINT, timeout=5).close()  # the Hub's own client would try again for half a minute
        paths = [hf_hub_download(REPOSITORY, name, repo_type="dataset") for name in FILES]
    except OSError as error:  # no connection, offline mode, an HTTP status
        print(f"no Carolina shard from the Hub: {' '.join(str(error).splitlines()[:1])}", file=sys.stderr)
        raise SystemExit(1) from None
    print(paths[-1])


if __name__ == "__main__":
    main()
