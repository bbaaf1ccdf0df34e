"""Counts of parts become those of files: bases of pieces, examples at their true places."""

from preprocessing.ingestion.encoding import Event
from preprocessing.ingestion.tally import Tally, bases_of, joined
from preprocessing.reading.pieces import Piece


def tally_of(*pieces: tuple[int, int]) -> Tally:
    """A part whose pieces had these numbers of lines and bytes, every line a document."""
    tally = Tally()
    for number, (lines, offset) in enumerate(pieces):
        tally.add(number, "documents", lines)
        tally.reached(number, lines=lines, offset=offset)
    return tally


def test_bases_count_what_stands_before_a_piece_in_its_file():
    parts = [((Piece(0), Piece(1)), tally_of((10, 100), (3, 30))), ((Piece(1), Piece(1)), tally_of((4, 40), (5, 50)))]
    first, second = bases_of(parts)

    assert (first.files, first.lines, first.offsets) == ([0, 1], [0, 0], [0, 0])
    assert (second.files, second.lines, second.offsets) == ([1, 1], [3, 7], [30, 70])

    whole = joined([tally for _, tally in parts], [first, second])
    assert {file: counts["lines"] for file, counts in whole.places.items()} == {"0": 10, "1": 12}
    assert whole.counts["documents"] == 22


def test_examples_are_placed_in_their_files():
    tally = tally_of((4, 40))
    tally.add_event(0, Event(2, "round_trip_differs"))
    tally.add_example("rejected", {"piece": 0, "file": "b", "line": 3, "byte_offset": 20, "reason": "why"})
    (before, base) = bases_of([((Piece(1),), tally_of((7, 70))), ((Piece(1),), tally)])
    examples = joined([tally_of((7, 70)), tally], [before, base]).examples

    assert examples["round_trip_differs"] == [{"file_number": 1, "line": 9}]
    (reject,) = examples["rejected"]
    assert reject == {"file_number": 1, "file": "b", "line": 10, "byte_offset": 90, "reason": "why"}


def test_a_tally_survives_being_saved():
    tally = tally_of((4, 40))
    tally.add_event(0, Event(1, "filtered", reason="subset A"))

    assert Tally.from_dict(vars(tally)) == tally
    assert tally.filtered == {"subset A": 1}
