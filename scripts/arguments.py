"""What the scripts' command lines share."""

import argparse


def positive(text: str) -> int:
    """An argparse type: a whole number from 1 on."""
    if not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"got {text!r}, accepted are whole numbers from 1 on")
    return int(text)
