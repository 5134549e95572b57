"""What the hero is like: for each mood a sentence that shows it early, and one for the moment of trouble."""

# ruff: noqa: E501  (a sentence is one line)

import random

MOODS: dict[str, tuple[str, str]] = {
    "brave": (
        "{He} was [not afraid of anything|the first to try every new thing|never scared, not even at night].",
        "[But {N} was brave.|{N} took a deep breath and felt brave.] {He} did not run away.",
    ),
    "shy": (
        "{He} was so shy that {he} [often hid behind a tree|spoke in a whisper|looked at {his} feet when others came by].",
        "{N} felt shy, and {his} voice was very small, [but {he} spoke up|but {he} tried] anyway.",
    ),
    "kind": (
        "{He} always [had a kind word for everyone|helped others, big or small|shared a smile].",
        "{N} was too kind to [walk away|look away|do nothing].",
    ),
    "clever": (
        "{He} liked [riddles|puzzles|hard questions] more than anything else.",
        "{N} sat down and thought hard. [A clever plan came to {him}.|Soon {his} eyes began to shine.]",
    ),
    "curious": (
        "{He} asked [a hundred questions|why and how] every day.",
        "{N} was very curious and wanted to know [everything|more] about it.",
    ),
    "lazy": (
        "{He} liked [to sleep until noon|to lie in the sun all day|naps better than work].",
        "For once, {N} did not feel lazy at all. {He} [jumped up|stood up at once].",
    ),
    "grumpy": (
        "{He} [grumbled at the rain and at the sun|hardly ever smiled|woke up in a bad mood every morning].",
        "{N} grumbled [a little|under {his} breath], but {he} wanted to help.",
    ),
    "happy": (
        "{He} [hummed a song all day long|laughed at every little thing|woke up with a smile each morning].",
        "{N} kept smiling, even now. [That helped a lot.|It made things easier.]",
    ),
    "sad": (
        "{He} [often felt alone|missed {his} old friends|sighed many times a day].",
        "A big tear rolled down. [But {N} wiped it away|But then {N} looked up] and stood tall.",
    ),
    "lonely": (
        "{He} had [nobody to play with|no one to talk to], and the days felt long.",
        "{N} felt lonely for a moment, [but {he} did not give up|but {he} went on].",
    ),
    "tiny": (
        "{He} was so tiny that {he} [could sleep in a shoe|could hide under a leaf|had to jump to look over the grass].",
        "{N} was tiny, [but {his} heart was big|but that did not matter now].",
    ),
    "little": (
        "{He} was the smallest in the family, [but {he} had big dreams|but nobody laughed louder].",
        "{N} was little, [but {he} was strong inside|but {he} stood as tall as {he} could].",
    ),
    "proud": (
        "{He} [told everyone how great {he} was|held {his} head very high|thought {he} needed no help].",
        "{N} was proud, and asking for help was [hard|not easy], but {he} did it.",
    ),
    "silly": (
        "{He} [wore a pot as a hat|walked backwards on Mondays|told jokes to the trees].",
        "{N} made a silly face, and [that made everyone feel better|the fear became smaller].",
    ),
    "sleepy": (
        "{He} [yawned all day|could fall asleep anywhere, even standing up].",
        "{N} was wide awake now. [{He} rubbed {his} eyes.|There was no time to yawn.]",
    ),
    "hungry": (
        "{He} [thought of food from morning to night|ate three breakfasts every day].",
        "{N} forgot that {he} was hungry. [This was more important.|There was work to do.]",
    ),
    "gentle": (
        "{He} [never hurt a fly|walked softly so that {he} did not step on the flowers].",
        "In a gentle voice {N} said that [all would be well|there was no need to worry].",
    ),
    "stubborn": (
        "When {he} wanted something, {he} [never gave up|would not change {his} mind].",
        "{N} was stubborn and would not [give up|go home] now.",
    ),
    "wise": (
        "{He} [had read many old books|knew the names of all the stars], and others came to ask for advice.",
        "{N} thought about it in a wise and quiet way. [Then {he} nodded.|Then {he} knew what to do.]",
    ),
    "clumsy": (
        "{He} [tripped over {his} own feet|dropped cups and bumped into doors] almost every day.",
        "{N} stumbled, because {he} was clumsy, [but {he} got up again|but {he} laughed and went on].",
    ),
    "cheerful": (
        "{He} [sang in the morning|greeted everyone with a song], and even the clouds seemed brighter.",
        "In a cheerful voice {N} said that they [could do it|would find a way].",
    ),
    "quiet": (
        "{He} did not say much, [but {he} listened well|but {he} saw everything].",
        "{N} stayed quiet and listened. [Then {he} knew what to do.|That was a good idea.]",
    ),
    "naughty": (
        "{He} [hid other people's socks|ate jam with {his} hands|played tricks on everyone].",
        "This time {N} did not play a trick. [It was too serious.|{He} wanted to be good.]",
    ),
    "young": (
        "{He} was still young, [and everything was new to {him}|and {he} learned something every day].",
        "{N} was young, [but {he} felt grown up that day|but {he} knew what was right].",
    ),
    "old": (
        "{He} was old, [and {his} back was a bit stiff|and {he} knew many stories].",
        "{N} was old, [but {his} heart felt young|but {he} walked as fast as {he} could].",
    ),
    "magic": (
        "{He} could [make small sparks dance in the air|talk to the wind], but only a little.",
        "A few magic sparks flew around {N}, [and {he} felt warm inside|and {he} knew what to do].",
    ),
    "friendly": (
        "{He} [waved at everyone|said hello to every bird and every stone].",
        "{N} gave a friendly smile. [It made things easier.|Nobody could be angry with {him}.]",
    ),
    "fast": (
        "{He} could run [faster than the wind|so fast that nobody could catch {him}].",
        "{N} was fast, and {he} lost no time. [Off {he} went.|{He} was ready at once.]",
    ),
    "slow": (
        "{He} was slow, [and the others often had to wait|but {he} never got lost].",
        "{N} was slow, [but {he} kept going, step by step|but {he} did not stop].",
    ),
    "nervous": (
        "{He} worried about [everything|rain, wind and loud noises].",
        "{N} was nervous, and {his} knees shook, [but {he} stayed|but {he} did not run].",
    ),
    "greedy": (
        "{He} [always wanted the biggest piece|kept everything for {himself}].",
        "For the first time, {N} did not think [of {himself}|about what {he} could get].",
    ),
    "polite": (
        "{He} never forgot to say please and thank you.",
        '"Excuse me, may I help?" asked {N} in a polite way.',
    ),
}
# The same in other words.
MOODS |= {
    new: (MOODS[base][0].replace(base, new), MOODS[base][1].replace(base, new))
    for new, base in {"small": "tiny", "fearless": "brave", "smart": "clever", "funny": "silly"}.items()
}
# For words that a request brings along and no list knows.
ANY_MOOD = (
    "[Nobody was as {mood} as {N}.|{He} was the most {mood} {k} of all.|Everyone said that {N} was {mood}.]",
    "[{N} thought about it for a while.|{N} had to smile.|{N} did not wait any longer.|{N} knew what to do.]",
)
OTHER_MOODS = """
angry beautiful blue bold bored bright busy calm careful caring charming chubby cold cool crazy cuddly cute daring
dreamy eager elegant evil famous fat fierce fluffy forgetful generous giant giggly golden good great green hairy
handsome helpful honest hopeful huge invisible jealous jolly kind-hearted loud lovely loyal lucky mean messy mighty
modest noisy orange patient pink playful plump poor pretty purple rainbow red rich royal rude scared scary selfish
serious shiny sick soft spotted strange striped strong sweet tall thirsty timid tired tough weird white wild worried
yellow young zany adventurous singing dancing
""".split()


def draw_mood(rng: random.Random) -> str:
    """A mood: mostly one with sentences of its own."""
    return rng.choice(list(MOODS)) if rng.random() < 0.8 else rng.choice(OTHER_MOODS)
