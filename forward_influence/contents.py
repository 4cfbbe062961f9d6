"""What the rows of a run folder are about, and whether a study may go on from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from forward_influence.errors import UserError


@dataclass
class Contents:
    """What finished rows are about.

    Attributes
    ----------
    done : set of str
        Their keys.
    texts : dict of str to str
        Hash of the tokens of each document.
    measured : dict of str to str
        A document with each text that was measured, by the text's hash.
    selectors : set of str
        Those with a measured row.
    """

    done: set[str] = field(default_factory=set)
    texts: dict[str, str] = field(default_factory=dict)
    measured: dict[str, str] = field(default_factory=dict)
    selectors: set[str] = field(default_factory=set)

    def add(self, row: dict, where: object) -> None:
        """Count a row in, unless its document has another text than in the rows before it."""
        if row["status"] != "failed":
            self.done.add(row["key"])
        check_text(self.texts, row["document"], row["document_sha"], where)
        if row["status"] == "ok":
            self.measured.setdefault(row["document_sha"], row["document"])
            self.selectors.add(row["selector"])

    def copy(self) -> Contents:
        """Another one, to add to."""
        return Contents(set(self.done), dict(self.texts), dict(self.measured), set(self.selectors))


@dataclass(frozen=True)
class Inputs:
    """What a study goes by name and must be the same in all rows of a folder.

    Attributes
    ----------
    texts : mapping of str to str
        Hash of the tokens of each document.
    code : mapping of str to str
        Hash of the source of each selector that does not come with this package.
    """

    texts: Mapping[str, str] = field(default_factory=dict)
    code: Mapping[str, str] = field(default_factory=dict)

    def check(self, contents: Contents, code: Mapping[str, str], where: object) -> None:
        """Refuse to go on from rows that were measured with something else under the same name."""
        for document, sha in self.texts.items():
            check_text(contents.texts, document, sha, where)
            twin = contents.measured.get(sha, document)
            if twin != document:
                raise UserError(
                    f"Document {document!r} has the text that {str(where)!r} holds as document {twin!r} and would "
                    "count twice; give another --out, or --fresh to move the old rows aside."
                )
        for selector in sorted(contents.selectors & self.code.keys()):
            check_code(selector, code.get(selector), self.code[selector], where)


def check_text(texts: dict[str, str], document: str, sha: str, where: object) -> None:
    """Refuse a document that has other tokens than before; `texts` collects the hashes."""
    if texts.setdefault(document, sha) != sha:
        raise UserError(
            f"Document {document!r} has other tokens than in earlier rows of {str(where)!r} (sha256 "
            f"{texts[document]} there, {sha} here); keep the texts apart with another --out, or --fresh to move the "
            "old rows aside."
        )


def check_code(selector: str, old: str | None, new: str | None, where: object) -> None:
    """Refuse rows of a selector whose source was another one."""
    if old and new and old != new:
        raise UserError(
            f"The code of selector {selector!r} is not that of its rows in {str(where)!r} (sha256 {old} there, "
            f"{new} here); give it a new name, or another --out, or --fresh to move the old rows aside."
        )


def survey(rows: Iterable[dict], where: object) -> Contents:
    """What rows are about."""
    contents = Contents()
    for row in rows:
        if row["status"] != "failed":
            contents.add(row, where)
    return contents
