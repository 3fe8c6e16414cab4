"""A view of the catalogue that tells what is new: what other processes have written since it last
looked."""

import sqlite3

from kvgraft.segments.store.catalogue import Catalogue, CatalogueRow
from kvgraft.segments.store.files import PayloadFiles


class CatalogueReader:
    """A connection that only reads. For one thread at a time, as `Catalogue`, and with what it
    raises."""

    def __init__(self, files: PayloadFiles) -> None:
        self._catalogue = Catalogue(files)
        self._version = -1
        self._last_id = 0

    def all_rows(self) -> tuple[list[CatalogueRow], list[tuple[int, bytes]]]:
        """As `Catalogue.rows`; what is there now is not new later."""
        self._version = self._catalogue.version()
        rows, damaged = self._catalogue.rows()
        self._last_id = max([row.id for row in rows] + [id for id, _ in damaged], default=0)
        return rows, damaged

    def new_rows(self) -> list[CatalogueRow] | None:
        """Rows that were not there before, least recently used first; None if nobody has written
        anything."""
        version = self._catalogue.version()
        if version == self._version:
            return None
        rows, _ = self._catalogue.rows(after=self._last_id)
        self._version = version
        self._last_id = max([row.id for row in rows], default=self._last_id)
        return rows

    def is_current(self, row: CatalogueRow) -> bool:
        """Whether the catalogue still has this row, as far as can be said; another process may have
        replaced it."""
        try:
            now = self._catalogue.get(row.key)
        except sqlite3.Error:
            return True
        return now is not None and now.digest == row.digest

    def close(self) -> None:
        """Close the connection."""
        self._catalogue.close()
