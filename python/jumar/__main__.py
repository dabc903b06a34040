"""``python -m jumar``: the same as the ``jumar`` command."""

from jumar.cli import main

if __name__ == "__main__":
    main()
