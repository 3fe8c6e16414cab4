"""The words of the bundled model: one word is one token, separated by white space."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>", "<system>", "<user>", "<assistant>", "<tool>")
END = "<eos>"
FUNCTION_WORDS = _words(
    ". : , ? = the code of is mentor lives in value now came they hold held by note means painted "
    "stands for near saw "
    "common most question doc and a to home owner theirs paint on at are holds gets given said "
    "seen codes with from "
    "need search find thought action observation tool agent wrote noted user answer read then"
)
NUMBERS = tuple(str(number) for number in range(10, 100))
NAMES = _words(
    "ada bob carl dora emil fay gus hana ivan june karl lena max nora otto pia quin rosa sam tess "
    "umar vera wim xena "
    "yara zane alma bert cleo dirk elsa finn greta hugo ines jack kira leo mina nils olga paul "
    "ruth sven tina ulf viv "
    "walt yves zoe abel beth cody dina earl faye glen hope igor jane kent lucy mark nell"
)
CITIES = _words(
    "oslo rome paris tokyo lima cairo delhi seoul quito accra minsk sofia berlin madrid lisbon "
    "dublin vienna prague "
    "warsaw athens havana bogota nairobi hanoi manila jakarta tunis riga tallinn malmo turin porto"
)
THINGS = _words(
    "amber coral jade onyx pearl ruby opal topaz quartz ivory silver copper iron brass marble "
    "granite lamp clock bell "
    "drum harp flute violin lantern compass anchor basket ladder hammer kettle mirror candle "
    "pillow blanket saddle "
    "wagon barrel bucket needle button ribbon feather shell stone brick tile rope chain hook lock "
    "key box crate chest "
    "vase bowl cup plate fork spoon knife broom brush comb wheel ladle coin stamp scarf glove boot "
    "coat tent flag mask "
    "ring seed sail oar bench"
)
VARIABLES = tuple(f"x{number}" for number in range(1, 49))
COLOURS = _words(
    "red blue green gold pink grey black white brown violet orange yellow teal lime navy rust"
)
ADJECTIVES = _words(
    "old quiet small long cold warm bright dark narrow wide distant gentle heavy empty early late"
)
PLACES = _words(
    "river road hill field forest garden house window door tower bridge market harbor valley "
    "meadow street"
)
VERBS = _words("slept waited stood turned moved faded opened closed rested ended")
NONSENSE_WORDS = _words(
    "dax wug zup fep mib tov lorn quib yax sprit glim narf plom vask drel huxo blick toma kess "
    "runi gorp snad thim "
    "pliv crum jund mave tesk olmo frib wint daku hesp zorl"
)

VOCABULARY = (
    *SPECIAL, *FUNCTION_WORDS, *NUMBERS, *NAMES, *CITIES, *THINGS, *VARIABLES, *COLOURS,
    *ADJECTIVES, *PLACES, *VERBS,
    *NONSENSE_WORDS,
)  # fmt: skip
"""Every word of the model; a word's token id is its place."""
