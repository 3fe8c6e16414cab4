"""Five short texts about the world and questions about them, for the demonstration on a real
model.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Passage:
    """A text, and how it is listed."""

    title: str
    text: str


@dataclass(frozen=True)
class TextQuestion:
    """A question, and the passages before it in its prompt, in order. Some do not matter.

    Attributes:
        text: the question as it is printed.
        asked: the question as the prompt puts it.
        begun: beginning of the answer, which is part of the prompt; the model continues it.
        expected: the right answer, if there is only one.
    """

    text: str
    passages: tuple[Passage, ...]
    asked: str
    begun: str = ""
    expected: str | None = None


@dataclass(frozen=True)
class Reading:
    """What a model reads and is then asked.

    Attributes:
        read: instructions, each with the passages that follow it in a prompt of phase 1.
        instruction: instruction of the prompts that ask.
        opening: first words of the user's message in these.
        questions: the questions.
        subject: what the questions are, for the summary: "questions about texts".
    """

    read: tuple[tuple[str, tuple[Passage, ...]], ...]
    instruction: str
    opening: str
    questions: tuple[TextQuestion, ...]
    subject: str


def _passage(title: str, text: str) -> Passage:
    """Return a passage with each paragraph on one line."""
    return Passage(
        title, "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))
    )


BEES = _passage(
    "Honeybees",
    """A honeybee colony in summer holds between twenty thousand and sixty thousand bees. Almost all of them are
workers, females that do not lay eggs. There are a few hundred males, called drones, and there is one queen. She can lay
up to 2,000 eggs in a day, and she lives for three to five years. A worker that hatches in summer lives for about six
weeks only, and spends the first three of them inside the hive, where she cleans cells, feeds larvae, builds comb out of
wax and guards the entrance. For the rest of her life she flies out to collect nectar, pollen and water.

Bees tell each other where flowers are by dancing. A bee that has found food far away walks in a figure of eight on
the comb, and shakes her body on the straight part in the middle. This is called the waggle dance. The angle of the
straight part gives the direction of the food relative to the sun, and its length gives the distance. The Austrian
scientist Karl von Frisch found out what the dance means, and received a Nobel Prize in 1973.

Honey is made from nectar. The bees carry it home in a honey stomach, pass it from mouth to mouth, spread it in the
cells of the comb, and fan it with their wings until most of the water has gone. When less than a fifth of it is
water, they close the cell with wax. One worker makes about a twelfth of a teaspoon of honey in her whole life. In
winter the colony does not sleep: the bees form a tight cluster around the queen, shiver to keep warm, and eat the
honey that they have stored.""",
)
TOWER = _passage(
    "The Eiffel Tower",
    """The Eiffel Tower in Paris was built for the World's Fair of 1889, one hundred years after the French
Revolution. Work began in January 1887 and took a little more than two years. The tower is named after Gustave
Eiffel, whose company built it, but the first drawings were made by two of his engineers, Maurice Koechlin and Emile
Nouguier. It consists of 18,038 pieces of wrought iron, which two and a half million rivets hold together. About
three hundred workers put them together on the site.

Many people disliked the plan. In 1887 a group of writers and artists published a letter of protest against it. The
city had agreed that the tower should stand for twenty years, and then be taken down. What saved it was the radio.
Eiffel offered the tower to the army and to scientists as a mast for antennas, and it proved so useful for sending
messages that the city decided to keep it. For forty-one years it was the tallest building in the world. Then, in
1930, the Chrysler Building in New York was finished.

With its antennas the tower is now 330 metres high. Visitors can go to three floors, by lift or, up to the second
floor, on foot: 674 steps lead there. On hot days the iron expands, and the tower grows by several centimetres. To
protect it from rust it is painted about every seven years. The painters work by hand, with brushes, and use sixty
tonnes of paint.""",
)
CANAL = _passage(
    "The Panama Canal",
    """The Panama Canal joins the Atlantic Ocean and the Pacific Ocean. It is 82 kilometres long. A French company
under Ferdinand de Lesseps, who had built the Suez Canal, began to dig in 1881. Landslides, malaria and yellow fever
stopped the work: more than twenty thousand workers died, and in 1889 the company was bankrupt. In 1904 the United
States took over. The doctor William Gorgas knew that mosquitoes carry both diseases, and had standing water drained
or covered with oil. Within two years there was no more yellow fever. The canal was opened on 15 August 1914.

Ships do not cross the land at the level of the sea. Locks lift them 26 metres up to Gatun Lake, which was made by a
dam across the Chagres River, and other locks lower them again on the other side. There are no pumps: all the water
comes from the lake and flows downhill. In the old locks small electric locomotives, called mules, keep a ship in
the middle of the chamber. To cross from one ocean to the other takes eight to ten hours. A ship from New York to
San Francisco saves about 13,000 kilometres, because it need not sail around South America.

Every ship pays a toll, which depends on its size. The lowest one was paid in 1928 by Richard Halliburton, an
American writer, who swam through the canal and was charged 36 cents. The United States governed the canal until the
end of 1999, when it was handed over to Panama. In 2016 a third set of locks was opened, for much larger ships.""",
)
WHALE = _passage(
    "The blue whale",
    """The blue whale is the largest animal that has ever lived. It grows to a length of thirty metres, and can
weigh more than 150 tonnes, as much as two dozen elephants. Its heart alone weighs about 180 kilograms. Even so it
lives on some of the smallest animals in the sea: krill, which look like tiny shrimps. In summer a blue whale eats
up to four tonnes of krill a day. It has no teeth. Hundreds of thin plates, called baleen, hang from its upper jaw.
The whale takes a huge mouthful of water, presses it out between the plates with its tongue, and swallows what stays
behind.

A calf is born after about eleven months. It is then seven metres long, drinks nothing but its mother's milk, and
gains ninety kilograms a day. Blue whales live for eighty to ninety years. Scientists can tell the age of a dead
whale from the wax in its ear, which has layers like the rings of a tree. The call of a blue whale is too low for
people to hear well, but it is one of the loudest sounds that any animal makes, and other whales hear it over
hundreds of kilometres.

For a long time blue whales were too fast for hunters. That changed when ships with engines and harpoon guns were
built. In the twentieth century about 360,000 blue whales were killed, and there were few left when hunting them was
banned in 1966. Today there are perhaps ten to twenty-five thousand. Ships that hit them, and nets in which they are
caught, are now the greatest dangers.""",
)
TEA = _passage(
    "Tea",
    """All tea comes from one plant, Camellia sinensis, an evergreen shrub. What makes one kind of tea different
from another is how the leaves are treated. For green tea they are heated soon after they have been picked, so that
they stay green. For black tea they are rolled and left in the air, where they turn dark, and are dried only then.
Oolong lies between the two. White tea is made from young buds, to which almost nothing is done.

A Chinese legend says that the emperor Shennong discovered tea in the year 2737 before Christ, when the wind blew
some leaves into his pot of boiling water. Dutch traders brought tea to Europe at the beginning of the seventeenth
century. In England it became fashionable after 1662, when King Charles the Second married Catherine of Braganza, a
princess from Portugal, who was used to drinking it. In 1773 people in Boston threw 342 chests of tea into the
harbour, because they did not want to pay a tax on it. The tea bag came by accident: around 1908 Thomas Sullivan, a
merchant in New York, sent samples in small bags of silk, and his customers put the bags into the water as they
were.

Black tea is made with boiling water. Green tea becomes bitter that way: for it the water should have about 80
degrees Celsius. Most tea is grown in China, followed by India, Kenya and Sri Lanka. After water, tea is what people
drink most.""",
)
# chosen by the answers of SmolLM2-135M under full recomputation, before any test with reuse
_QUESTIONS = (
    ("After whom is the Eiffel Tower named?", (BEES, TOWER)),
    ("How long is the Panama Canal?", (TEA, WHALE, CANAL)),
    ("From which plant does all tea come?", (TOWER, TEA)),
    ("When was the Panama Canal opened?", (BEES, TEA, CANAL)),
    ("Who received a Nobel Prize in 1973?", (TEA, BEES)),
    ("How often is the Eiffel Tower painted?", (WHALE, TOWER)),
)
WORLD = Reading(
    read=(
        ("You write headlines.", (TOWER, BEES)),
        ("You find spelling mistakes.", (TEA, WHALE)),
        ("You translate into French.", (CANAL,)),
    ),
    instruction="You read texts and answer questions about them briefly.",
    opening="Read these texts.",
    questions=tuple(
        TextQuestion(
            text, passages, f"Use the texts to answer this question in one sentence: {text}"
        )
        for text, passages in _QUESTIONS
    ),
    subject="questions about texts",
)
