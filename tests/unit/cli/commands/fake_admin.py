"""An admin client of a cluster that is not there; kinds of it answer what a test asks."""

from typing import Self


class FakeAdmin:
    """Whatever it is made with."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass
