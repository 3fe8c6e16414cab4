"""Wordings and subjects of similar documents."""

from collections.abc import Sequence
from dataclasses import dataclass

NAMES = (
    "Zeta", "Orion", "Falcon", "Theta", "Willow", "Nova", "Sigma", "Harbor", "Delta", "Maple",
    "Kappa", "Summit", "Omega", "Comet", "Raven", "Lambda", "Cedar", "Polar", "Gamma", "Coral",
    "Titan", "Alpha", "Ember", "Lotus", "Sable", "Vega", "Birch", "Atlas", "Pearl", "Rocket",
    "Cobalt", "Meadow", "Jade", "Tundra", "Saturn", "Breeze", "Onyx", "Prairie", "Quartz", "Canyon",
    "Indigo", "Glacier", "Hazel", "Beacon", "Lunar", "Saffron", "Mango", "Arrow", "Pepper",
    "Cactus", "Bamboo", "Thunder", "Garnet", "Anchor", "Nimbus", "Violet", "Sierra", "Tulip",
    "Walnut", "Zephyr",
)  # fmt: skip
PARTS = (
    "red button", "grey lever", "brass key", "blue switch", "white dial", "black pedal",
    "green handle", "yellow knob", "steel crank", "orange valve", "silver latch", "brown strap",
    "pink slider", "copper plug", "glass cover", "rubber bolt", "purple hatch", "golden chain",
    "wooden wedge", "iron hook", "plastic cap", "marble tile", "leather belt", "paper tag",
    "cotton cord", "ceramic ring", "velvet rope", "cork stopper", "tin whistle", "chrome wheel",
    "felt pad", "wax seal",
)  # fmt: skip
PLACES = (
    "Trondheim", "Porto", "Ghent", "Krakow", "Malaga", "Turin", "Zurich", "Bergen",
)  # fmt: skip
PEOPLE = (
    "Anna", "Boris", "Clara", "David", "Elena", "Felix", "Greta", "Henry", "Irene", "Jonas",
    "Karen", "Louis", "Maria", "Nadia", "Oscar", "Paula", "Quentin", "Rosa", "Simon", "Teresa",
    "Ursula", "Victor", "Wanda", "Xavier", "Yvonne", "Alice", "Bruno", "Carol", "Daniel", "Emma",
    "Frank", "Gloria",
)  # fmt: skip


@dataclass(frozen=True)
class Form:
    """Wording of documents of one kind. In all texts `{e}` is the entity and `{v}` a value.

    Attributes:
        entity: name of an entity from a name `{n}`, or `{lower}` in lower case.
        facts: wordings of four facts, from which a document draws one each: an own value, a value
            that others share (a place), a number, and another own value.
        values: values of the first and of the last fact.
        questions: questions for the own values, and the beginnings of the answers.
        compare: question which of `{a}` and `{b}` has the greater number, and the beginning of the
            answer.
        count: question how many have the shared value.
        rest: sentences without information about the entity, for longer documents.
        in_order: True if these keep their order.
        separator: text between sentences.
    """

    entity: str
    facts: tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...], tuple[str, ...]]
    values: tuple[Sequence[str], Sequence[str]]
    questions: tuple[tuple[str, str], tuple[str, str]]
    compare: tuple[str, str]
    count: str
    rest: tuple[str, ...]
    in_order: bool = False
    separator: str = " "


FORMS = {
    "notes": Form(
        entity="{n} pump",
        facts=(
            ("The {e} is reset by moving the {v} for three seconds.",),
            ("It was built in {v}.",),
            ("It weighs {v} kilograms.",),
            ("Only {v} may repair the {e}.",),
        ),
        values=(PARTS, PEOPLE),
        questions=(
            ("How is the {e} reset?", "The {e} is reset by moving the"),
            ("Who may repair the {e}?", "The only one who may repair the {e} is"),
        ),
        compare=("Which is heavier, the {a} or the {b}?", "The heavier one is the"),
        count="How many of the pumps were built in {v}?",
        rest=(
            "Switch it off at the wall before any work is done on it.",
            "Keep the floor around it dry and free of boxes.",
            "Its filter is cleaned on the first Monday of every month.",
            "The oil level must stay between the two marks on the gauge.",
            "Unusual noise is reported to the control room at once.",
            "After a power cut it starts again only when somebody asks for it.",
            "Spare seals are kept in the cabinet beside the door.",
            "A yearly inspection is required by the insurance.",
            "Do not paint over the type plate.",
            "The cable must not be extended.",
            "Wear gloves whenever the lid is open.",
            "Write every repair into the log book on the same day.",
        ),
    ),
    "faq": Form(
        entity="{n} plan",
        facts=(
            ("Q: How do I cancel the {e}?\nA: Call {v} and say that you want to stop.",),
            ("Your data is stored in {v}.",),
            ("It costs {v} euros a month.",),
            ("New customers of the {e} receive a {v} as a gift.",),
        ),
        values=(PEOPLE, PARTS),
        questions=(
            ("How do I cancel the {e}?", "To cancel the {e}, call"),
            ("What do new customers of the {e} receive?", "New customers of the {e} receive a"),
        ),
        compare=("Which is more expensive, the {a} or the {b}?", "The more expensive one is the"),
        count="How many of the plans store data in {v}?",
        rest=(
            "Cancelling takes effect at the end of the month.",
            "You can change your mind within fourteen days.",
            "Invoices are sent by mail on the first working day.",
            "Payment by card or bank transfer is possible.",
            "Prices may change once a year and are announced in advance.",
            "Support answers within two working days.",
            "Accounts that are not used for a year are closed.",
            "Please have your customer number ready.",
            "We never ask for your password.",
            "The terms of use apply to every account.",
            "A second user can be added at any time.",
            "Backups are made every night.",
        ),
    ),
    "rows": Form(
        entity="{n} kettle",
        facts=(
            ("product: {e} | part: {v}",),
            ("made in: {v}",),
            ("price: {v} euros",),
            ("contact for {e}: {v}",),
        ),
        values=(PARTS, PEOPLE),
        questions=(
            ("Which part belongs to the {e}?", "The part of the {e} is the"),
            ("Who is the contact for the {e}?", "The contact for the {e} is"),
        ),
        compare=(
            "Which has the higher price, the {a} or the {b}?",
            "The one with the higher price is the",
        ),
        count="How many of the products are made in {v}?",
        rest=(
            "unit: piece",
            "tax: standard",
            "returns: 30 days",
            "packing: carton",
            "warranty: 2 years",
            "voltage: 230 volts",
            "language of manual: English",
            "sold by: the shop",
            "pallet: no",
            "fragile: yes",
            "approved: yes",
            "storage: dry",
            "category: kitchen",
            "season: all year",
            "label: printed",
            "insured: yes",
        ),
        separator=" | ",
    ),
    "tickets": Form(
        entity="{n} server",
        facts=(
            ("Ticket about the {e}\nOpened by: {v}",),
            ("Site: {v}",),
            ("Hours of work: {v}",),
            ("Solution for the {e}: the {v} was replaced",),
        ),
        values=(PEOPLE, PARTS),
        questions=(
            ("Who opened the ticket about the {e}?", "The ticket about the {e} was opened by"),
            (
                "What was replaced in the {e}?",
                "The solution for the {e} is that a part was replaced, the",
            ),
        ),
        compare=(
            "Which took more hours of work, the {a} or the {b}?",
            "The one that took more hours is the",
        ),
        count="How many of the tickets are from the site {v}?",
        rest=(
            "Priority: normal",
            "Status: closed",
            "Channel: phone",
            "The user was informed of the solution.",
            "No data was lost.",
            "The monitoring showed no other alarms.",
            "The change was approved by the team.",
            "A restart was needed.",
            "The problem was seen for the first time.",
            "Follow-up: none",
            "The log files were attached to the ticket.",
            "The machine was in use at the time.",
            "The documentation was checked and is correct.",
            "Category: hardware",
        ),
        separator="\n",
    ),
    "functions": Form(
        entity="load_{lower}",
        facts=(
            ('def {e}(path, timeout):\n    """Load a file."""\n    owner = "{v}"',),
            ('    region = "{v}"',),
            ("    limit = {v}",),
            ('    {e}.device = "{v}"',),
        ),
        values=(PEOPLE, PARTS),
        questions=(
            ("Which owner is set in the function {e}?", 'In {e} the owner is "'),
            ("Which device belongs to the function {e}?", 'In {e} the device is "'),
        ),
        compare=(
            "In which function is the limit greater, {a} or {b}?",
            "The limit is greater in the function",
        ),
        count='In how many of the functions is the region "{v}"?',
        rest=(
            "    if timeout is None:\n        timeout = 30",
            '    logging.debug("reading %s", path)',
            "    if not path.exists():\n        raise FileNotFoundError(path)",
            "    started = time.monotonic()",
            "    with open(path) as file:\n        lines = file.readlines()",
            "    lines = [line.strip() for line in lines if line.strip()]",
            "    elapsed = time.monotonic() - started",
            '    logging.debug("took %.1f seconds", elapsed)',
            "    if elapsed > timeout:\n        raise TimeoutError(path)",
            "    checksum = hash(tuple(lines))",
            "    cache[path] = checksum",
            "    return lines",
        ),
        in_order=True,
        separator="\n",
    ),
    "profiles": Form(
        entity="{n} hotel",
        facts=(
            (
                "Every guide to the coast begins with the {e}, where {v} is the manager.",
                "The manager of the {e} is called {v}.",
                "At the {e}, guests are welcomed by its manager, {v}.",
                "{v} has managed the {e} for some years now.",
                "If you write to the {e}, your letter goes to {v}, who manages it.",
                "Few managers are as well liked as {v} of the {e}.",
            ),
            (
                "The architect came from {v}.",
                "An architect of {v} drew the plans.",
                "Its plans were made by somebody in {v}.",
                "{v} is where its architect lived.",
            ),
            (
                "There are {v} rooms.",
                "With {v} rooms it is not large.",
                "One can choose among {v} rooms.",
                "Some {v} rooms look out on the garden.",
            ),
            (
                "A {v} is the sign of the {e}.",
                "The {e} has a {v} in its coat of arms.",
                "Whoever sees a {v} above a door has found the {e}.",
                "On every towel of the {e} there is a {v}.",
                "The {e} is known by its sign, a {v}.",
            ),
        ),
        values=(PEOPLE, PARTS),
        questions=(
            ("Who is the manager of the {e}?", "The manager of the {e} is"),
            ("What is the sign of the {e}?", "The sign of the {e} is a"),
        ),
        compare=("Which has more rooms, the {a} or the {b}?", "The one with more rooms is the"),
        count="How many of the hotels have an architect from {v}?",
        rest=(
            "Breakfast is served until eleven on a terrace above the sea.",
            "In winter a fire burns in the hall, and there is soup at noon.",
            "Bicycles can be rented next door for a small fee.",
            "The night train stops a short walk away.",
            "Dogs are welcome as long as they are quiet.",
            "A painter once paid his bill with the picture behind the counter.",
            "Most people come back for the garden and its old pear trees.",
            "Street noise is a problem on market days, so ask for a quiet side.",
            "The lift is narrow and slow, the stairs are steep.",
            "On Sundays a small band plays in the courtyard.",
            "Towels and bathrobes are changed daily without extra charge.",
            "Its library has novels in nine languages.",
            "The kitchen cooks with what the morning market offers.",
            "Children under six stay free of charge.",
            "Late guests find their keys in a box beside the entrance.",
            "A ferry leaves twice a day from the pier below.",
            "Since the repairs of last spring the roof no longer leaks.",
            "The bar closes at midnight, the piano at ten.",
            "Some floors creak, which regular visitors find charming.",
            "Reservations by telephone are answered fastest before noon.",
        ),
    ),
}
