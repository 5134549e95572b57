"""Kinds of characters, homes, destinations and things: what the plots are filled with."""

import random

from . import names

KINDS = """
fox rabbit bear mouse owl cat dog puppy kitten frog duck duckling hen goose swan pig piglet cow calf horse pony donkey
goat lamb sheep deer fawn wolf badger hedgehog squirrel mole otter beaver raccoon skunk bat crow robin sparrow eagle
parrot penguin seal whale dolphin crab turtle tortoise snail bee ant ladybug butterfly beetle spider lizard snake
gecko crocodile elephant girl boy girl boy lion lioness tiger leopard zebra giraffe hippo rhino monkey gorilla panda
koala kangaroo camel llama hamster chipmunk fish octopus shark dragon unicorn robot snowman ghost fairy elf gnome
wizard witch pirate knight princess prince girl boy flamingo moose hare chick cub yak sloth walrus firefly caterpillar
dinosaur toad weasel ferret stork pelican
""".split()

RARE_KINDS = """
platypus armadillo anteater emu ostrich turkey vulture falcon magpie swallow pigeon peacock jellyfish starfish salmon
trout shrimp lobster worm cricket grasshopper moth wasp mosquito scorpion tadpole newt alligator iguana dodo mammoth
bison buffalo ox mule lynx cheetah jaguar hyena meerkat mongoose lemur baboon orangutan wombat dingo puma coyote
jackal gerbil tapir boar goblin ogre mermaid vampire zombie alien astronaut baker farmer fisherman king queen sailor
teacher doctor ninja clown teapot spoon tractor train car boat cloud star tree flower pumpkin potato carrot cupcake
pencil sock shoe chair clock tractor
""".split()

# A pronoun that the word itself fixes.
KIND_PRONOUN = {
    "hen": "she", "cow": "she", "lioness": "she", "princess": "she", "girl": "she", "witch": "she", "prince": "he",
    "boy": "he", "wizard": "he", "king": "he", "queen": "she", "mermaid": "she",
}  # fmt: skip

HOMES = """
by the sea
by the river
by a quiet lake
in a small house near the forest
at the edge of a green wood
in a cosy burrow under a hill
on a sunny farm
in a little village
high up in the mountains
in an old oak tree
near a blue pond
in a busy town
on a tiny island
in a deep dark forest
in a warm valley
next to an old windmill
in a tall tower
under a stone bridge
in a garden full of flowers
in the jungle
in the desert
in a snowy land
at the foot of a mountain
behind a waterfall
in a meadow
in a castle
in a big city
in a cottage with a blue door
in a cave by the shore
on top of a windy hill
in a lighthouse
at the end of a long road
""".strip().splitlines()

_HOME_NOUNS = """
forest lake river hill mountain castle village town city tree house cave garden field meadow beach bridge farm barn
tower pond island swamp valley school shop library lighthouse mill market zoo museum park ship volcano igloo tent
palace cottage hut harbour cloud moon treehouse attic kitchen basement well rock oak stream glacier canyon
""".split()
_HOME_ADJECTIVES = (
    "big small old quiet green blue white dark sunny tiny golden lonely misty windy snowy red strange".split()
)

# Where the hero goes: (noun phrase, preposition for being there).
PLACES = [
    (noun, preposition)
    for preposition, nouns in {
        "in": "the dark forest|the tall grass|the deep valley|the old castle|the apple orchard|the misty swamp"
        "|the quiet garden|the bamboo grove|the empty barn|the crystal cave|the snowy field|the rose garden"
        "|the hollow tree|the wild meadow",
        "by": "the old bridge|the wide river|the silver lake|the waterfall|the stone well|the frozen pond|the big rock"
        "|the mill",
        "on": "the high hill|the windy cliff|the sandy beach|the tall mountain|the rocky shore|the little island"
        "|the market square",
    }.items()
    for noun in nouns.split("|")
]

COLOURS = """
red blue green yellow golden silver purple white orange pink striped shiny tiny old wooden little big magic strange
brown black grey long round soft new broken glass paper woollen dotted rainbow lucky secret pretty
""".split()
TOYS = [
    "kite", "ball", "drum", "boat", "scarf", "hat", "music box", "toy train", "balloon", "flute", "bell", "blanket",
    "crown", "marble", "puppet", "whistle", "cup", "ribbon", "book", "spinning top", "necklace", "umbrella", "basket",
    "lantern", "kettle", "spoon", "pillow", "trumpet", "violin", "hammer", "bucket", "telescope", "compass", "camera",
    "clock", "mirror", "backpack", "coat", "belt", "ball of wool", "toy car", "doll", "teddy bear", "paintbrush",
    "pencil", "candle", "flag", "guitar", "skateboard", "sledge", "mug", "teapot", "bracelet", "magnet", "hat box",
    "cushion", "wagon", "flower pot", "treasure map",

]  # fmt: skip
TREASURES = [
    "key",
    "map",
    "egg",
    "feather",
    "stone",
    "seed",
    "shell",
    "ring",
    "box",
    "letter",
    "lamp",
    "coin",
    "bottle",
    "door",
]
# The things that fit a plot: any, light enough to fly, warm to wear, long enough to hold at both ends, a nest.
ITEMS = {
    "toy": TOYS,
    "light": ["kite", "balloon", "umbrella", "paper plane", "flag", "parachute"],
    "warm": ["scarf", "coat", "blanket", "hat", "jacket", "cape", "shawl", "jumper"],
    "long": ["rope", "scarf", "blanket", "fishing net", "ladder", "belt", "ribbon", "fishing rod", "broom"],
    "nest": ["hat", "scarf", "basket", "backpack", "blanket", "bucket", "teapot", "cup", "coat", "bag", "box"],
}
FOODS = """
apple pie
honey cake
carrot soup
bread
cheese
berries
nuts
pancakes
plum jam
pumpkin pie
cookies
strawberries
cherries
sweet corn
mushroom soup
blueberry muffins
""".strip().splitlines()
SKILLS = [
    ("swim", "swimming", "the water"), ("sing", "singing", "the song"), ("dance", "dancing", "the dance"),
    ("paint", "painting", "the picture"), ("skate", "skating", "the ice"), ("juggle", "juggling", "the three balls"),
    ("whistle", "whistling", "the tune"), ("climb", "climbing", "the rope"), ("read", "reading", "the long words"),
    ("play the drum", "drumming", "the beat"), ("bake", "baking", "the dough"),
    ("ride a bike", "cycling", "the wheels"),

]  # fmt: skip
# Nobody has to learn what they were born to do.
BORN_ABLE = {
    "swim": """fish whale dolphin seal shark octopus duck duckling frog turtle otter beaver penguin crab walrus swan
    goose""".split(),
    "climb": "monkey squirrel cat chipmunk gorilla koala gecko".split(),
    "sing": "robin sparrow swallow mermaid".split(),
}
FEARS = [
    ("the dark", "night came", "the stars looked like tiny lamps"),
    ("thunder", "a storm came", "the thunder sounded like a big drum"),
    ("deep water", "the others went to the lake", "the water felt cool and soft"),
    ("high places", "the others climbed the hill", "the whole world looked like a map"),
    ("loud noises", "the band marched by", "the noise turned into music"),
    ("meeting strangers", "a visitor came to town", "the stranger had a very kind smile"),
]  # fmt: skip
MONSTERS = ["dragon", "giant", "troll", "monster", "old bear", "big grey wolf", "huge owl", "sea monster"]


def kind(rng: random.Random, made_up: float) -> str:
    """What a character is: mostly an animal of the first list, now and then something that does not exist."""
    fate = rng.random()
    if fate < made_up:
        return names.invented(rng).lower()
    return rng.choice(RARE_KINDS if fate < 0.14 else KINDS)


def home(rng: random.Random) -> str:
    """Where a character lives: a fixed phrase, or one put together."""
    if rng.random() < 0.6:
        return rng.choice(HOMES)
    preposition = rng.choice(("in", "near", "behind", "under", "on", "by", "next to", "inside", "far from", "at"))
    adjective = rng.choice(_HOME_ADJECTIVES) + " " if rng.random() < 0.6 else ""
    return f"{preposition} {rng.choice(('a', 'the'))} {adjective}{rng.choice(_HOME_NOUNS)}"
