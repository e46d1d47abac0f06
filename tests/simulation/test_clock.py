"""Simulated time itself."""

from tests.simulation.clock import Clock


def test_what_is_asked_for_the_same_instant_happens_in_the_order_of_asking() -> None:
    """Sums of floats differ in their last bits by the order of their terms."""
    clock = Clock()
    happened: list[int] = []
    instants = [0.0, 2.4, 3.5, 4.5, 5.5, 6.5]
    assert len({at + (6.63 - at) for at in instants}) > 1, "these instants show nothing"
    for number, at in enumerate(instants):

        def ask(number: int = number, at: float = at) -> None:
            clock.after(6.63 - at, lambda: happened.append(number))

        clock.after(at, ask)
    for _ in range(2 * len(instants)):
        clock.step()
    assert happened == list(range(len(instants)))
    assert clock.now == 6.63
