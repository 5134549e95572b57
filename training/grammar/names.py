"""Names: several hundred real ones, some for pets, and made-up ones without end.

Made-up names teach the model to copy a name it has never seen from the request instead of recalling one it knows.
"""

import random
import zlib

from .pieces import ENDS, STARTS

GIRLS = """
Mia Lily Emma Anna Zoe Ella Lucy Ruby Rosie Daisy Molly Poppy Ivy Clara Nora Maya Hana Aisha Priya Lena Greta Heidi
Sofia Luna Stella Alice Grace Chloe Amelia Olivia Ava Isla Evie Freya Elsie Maisie Hazel Willow Olive Iris Violet
Flora Penny Tilly Milly Nell Bella Gemma Jenny Katie Kate Jane Sarah Hannah Leah Rachel Naomi Ruth Esther Miriam Tamar
Yael Fatima Layla Amina Zahra Noor Leila Samira Yasmin Nadia Farah Mei Ling Yuki Sakura Keiko Aiko Emi Nari Jiwoo Thuy
Linh Anya Olga Katya Tanya Vera Mila Irina Zofia Kasia Ewa Hanka Jana Petra Eliska Ilse Frieda Lotte Marta Carmen
Lucia Elena Ines Paloma Rosa Camila Valentina Giulia Chiara Bianca Francesca Amelie Camille Juliette Manon Celine
Odette Astrid Ingrid Saga Linnea Freja Sigrid Aino Helmi Kaisa Aoife Niamh Saoirse Fiona Isobel Morag Catrin Nia
Bronwyn Amara Zuri Imani Nia Adaeze Ngozi Abena Akua Thandi Lindiwe Makena Wanjiru Sita Gita Lakshmi Meera Kavya
Anjali Diya Asha Tara Nila Pia Ada Edith Agnes Beatrix Cora Dora Eve Fay Gwen Ida June Kira Lola Mabel Nina Opal Pearl
Quinn Rita Sally Tess Una Wendy Xenia Yvonne Marie Betty Susie Dolly Peggy Polly Nancy Laura Julia Victoria Charlotte
Emily Sophie Harriet Matilda Josie Abby Carla
"""
BOYS = """
Tom Ben Max Sam Leo Jack Oscar Finn Theo Noah Liam Ethan Oliver George Harry Charlie Alfie Archie Henry Arthur Toby
Louis Jake Luke Adam Ryan Dylan Nathan Isaac Jacob Daniel David Joshua Caleb Eli Levi Asher Ezra Omar Ali Yusuf Hassan
Karim Tariq Bilal Idris Rashid Samir Kenji Hiro Taro Haru Ren Sota Jin Minho Wei Bao Long Minh Duc Ivan Boris Misha
Pavel Dmitri Anton Jakub Marek Tomas Vaclav Jan Piotr Kuba Hans Fritz Karl Otto Emil Moritz Felix Lukas Jonas Anders
Lars Sven Nils Erik Olaf Mikko Eino Pekka Sean Conor Declan Ronan Hamish Angus Callum Rhys Dylan Gareth Owen Evan Kofi
Kwame Jabari Tunde Chidi Emeka Sipho Thabo Baraka Juma Arjun Rohan Vikram Ravi Kiran Anil Dev Nikhil Sanjay Pablo
Diego Mateo Carlos Luis Javier Rafael Miguel Hugo Marco Luca Matteo Paolo Enzo Dante Pierre Jules Remy Gaston Antoine
Bruno Andre Albert Alan Bert Bob Cecil Clive Colin Dennis Edgar Frank Fred Gus Harold Ian Jasper Jim Joe John Keith
Ken Len Martin Mike Monty Ned Nick Norman Paul Percy Peter Phil Ralph Ray Robin Roger Rory Rufus Rupert Sid Simon
Stanley Steve Ted Tim Tony Victor Walter Will Zack William Edward James Alex Chris Patrick Lewis Logan Mason Jordan
Kevin Barney Billy Bobby Danny Eddie Freddie Georgie Johnny Lenny
"""
PETS = """
Pip Biscuit Pepper Button Clover Nutmeg Honey Maple Acorn Bramble Pebble Sunny Cookie Muffin Peanut Ginger Cinnamon
Waffles Snowy Patch Spot Whiskers Fluffy Shadow Smoky Sparky Dot Bubbles Twig Fern Moss Rusty Dusty Misty Stormy Cloud
Star Coco Momo Kiki Bibi Lulu Toto Bobo Nono Tiko Zaza Fizz Fuzzy Scamper Dash Zippy Ziggy Bean Olly Wally Teddy Bingo
Rex Bruno Tilda Hop
"""

_ONSETS = (
    "b c d f g h j k l m n p r s t v w z bl br ch cl cr dr fl fr gl gr kr pl pr sh sk sl sn sp st th tr tw".split()
)
_VOWELS = "a e i o u a e i o a o i ee oo ai ie y".split()
_CODAS = "b d ck g l m n p r s t x z nk ll mp nd rt sh ff".split()
_ENDINGS = ["a", "o", "i", "y", "ie", "el", "in", "us", "le", "en", "ix", "ara", "ella", "ino", "ette"]


def is_held_out(name: str) -> bool:
    """Whether a name is kept out of the corpus, to test copying; one in twelve, by its own checksum."""
    return zlib.crc32(name.encode()) % 12 == 0


def _listed(text: str, held_out: bool) -> list[str]:
    return [name for name in dict.fromkeys(text.split()) if is_held_out(name) == held_out]


KNOWN = {
    "she": _listed(GIRLS, False) + _listed(PETS, False)[::2],
    "he": _listed(BOYS, False) + _listed(PETS, False)[1::2],
}
HELD_OUT = _listed(GIRLS, True) + _listed(BOYS, True) + _listed(PETS, True)


def invented(rng: random.Random) -> str:
    """A pronounceable name of one to three syllables, such as "Zorbina" or "Plim"."""
    while True:
        parts = [rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(rng.choice((1, 1, 2, 2)))]
        parts.append(rng.choice(_CODAS) if rng.random() < 0.55 else "")
        parts.append(rng.choice(_ENDINGS) if rng.random() < 0.5 and parts[-1] else "")
        name = "".join(parts).capitalize()
        if 3 <= len(name) <= 10 and not is_held_out(name):
            return name


def _known(rng: random.Random) -> str:
    return rng.choice(KNOWN[rng.choice(("she", "he"))])


def blended(rng: random.Random) -> str:
    """The head of one known name and the tail of another, such as "Marina": it starts like a name the model knows."""
    head, tail = _known(rng), _known(rng)
    return head[: rng.randint(1, len(head) - 1)] + tail[rng.randint(1, len(tail) - 1) :]


def altered(rng: random.Random) -> str:
    """A known name with one or two letters put in, left out or replaced."""
    letters = list(_known(rng))
    for _ in range(rng.choice((1, 1, 2))):
        at, new = rng.randrange(len(letters)), rng.choice("aaeeiioouybcdfghjklmnprstvwz")
        letters[at : at + rng.choice((0, 1, 1))] = [new] if rng.random() < 0.75 else []
    return "".join(letters).lower().capitalize()


def spelled(rng: random.Random) -> str:
    """Letters of a made-up name one by one, consonants and vowels in turn with a few slips."""
    start = rng.randrange(2)
    classes = ("bcdfghjklmnpqrstvwxz", "aeiouy")
    letters = (rng.choice(classes[(start + i + (rng.random() < 0.12)) % 2]) for i in range(rng.randint(3, 7)))
    return "".join(letters).capitalize()


def pieced(rng: random.Random) -> str:
    """Two or three of the tokenizer's own pieces, such as "F" and "arah"."""
    return rng.choice(STARTS) + "".join(rng.choice(ENDS) for _ in range(rng.choice((1, 1, 2))))


def fresh(rng: random.Random) -> str:
    """A name in one of five ways, nearly never the same twice, which comes in two to four tokens mostly."""
    while True:
        name = rng.choice((invented, blended, altered, spelled, pieced, pieced, pieced))(rng)
        if 3 <= len(name) <= 10 and not is_held_out(name):
            return name


def pick(rng: random.Random, invent: float) -> tuple[str, str]:
    """A name and the pronoun that goes with it; a fresh name with the probability given."""
    pronoun = rng.choice(("she", "he"))
    return (fresh(rng) if rng.random() < invent else rng.choice(KNOWN[pronoun])), pronoun
