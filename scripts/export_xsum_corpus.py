"""Exports XSum's articles to megatron_data/xsum_text.jsonl, one {"text": ..., "summary": ..., "id": ...} per line.

    python scripts/export_xsum_corpus.py                                   # the train split, from the Hugging Face hub
    XSUM_SOURCE=/data/xsum.parquet python scripts/export_xsum_corpus.py    # from a local file

`text` is the article (XSum's `document`), on which the model is pretrained; `summary` is included but not used.
Articles without text are skipped and counted. Settings: XSUM_SOURCE, XSUM_SPLIT, XSUM_LIMIT, MEGATRON_DATA_DIR and
WORKERS, as for prepare_xsum_megatron.sh, which also exports, or reuses an earlier export from the same source.

Exit status: 0, or 2 with one sentence on standard error; then nothing was written and an older file is unchanged.
"""

import argparse
import os
import sys
from pathlib import Path

argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
repository = Path(__file__).resolve().parent.parent
settings = os.environ | {"MEGATRON_DATA_DIR": os.environ.get("MEGATRON_DATA_DIR") or str(repository / "megatron_data")}
settings |= {"PYTHONPATH": os.pathsep.join(filter(None, (str(repository), os.environ.get("PYTHONPATH"))))}
# From Python 3.11 on, PYTHONSAFEPATH keeps another t5bench in the current directory out.
settings |= {"TOKENIZER_MODEL": "", "PYTHONSAFEPATH": "1"}
os.execve(sys.executable, [sys.executable, "-m", "t5bench", "prepare-data"], settings)
