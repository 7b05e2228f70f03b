"""The day of departures, as the data file has it."""

import json

from duemq_server.demo.day import SPEED_DEFAULT, load_day, read_day, schedule

HEADER = "carrier,flight,tailnum,origin,dest,sched_dep_time,dep_time\n"


def test_a_row_becomes_a_departure() -> None:
    (flight,) = read_day([HEADER, "US,1431,N564UW,EWR,CLT,959,1003\n"])
    assert (flight.flight, flight.tail, flight.origin) == ("US1431", "N564UW", "EWR")
    assert (flight.minute, flight.cancelled) == (9 * 60 + 59, False)
    assert json.loads(flight.body)["dest"] == "CLT"


def test_an_empty_departure_time_is_a_cancelled_flight() -> None:
    (flight,) = read_day([HEADER, "EV,1,,EWR,MSP,620,\n"])
    assert flight.cancelled
    assert flight.tail == ""


def test_the_schedule_is_compressed_from_the_first_departure() -> None:
    day = read_day([HEADER, "AA,1,N1,JFK,MIA,500,500\n", "AA,2,N1,JFK,MIA,600,600\n"])
    assert schedule(day, 1_000, 60.0) == {"AA1": 1_000, "AA2": 61_000}


def test_the_day_that_comes_with_the_package() -> None:
    day = load_day()
    assert len(day) == len({departure.flight for departure in day}) == 1_004
    assert sum(departure.cancelled for departure in day) == 121
    due = schedule(day, 0, SPEED_DEFAULT).values()
    assert 59_000 <= max(due) - min(due) <= 61_000
