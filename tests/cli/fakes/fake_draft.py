"""A fake draft service."""

from fake_services import main

if __name__ == "__main__":
    main("draft")
