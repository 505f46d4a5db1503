"""Fine-tune a Hugging Face model on conversations: `memo finetune`, as a script for launchers that take one."""

import sys

from memo.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["finetune", *sys.argv[1:]]))
