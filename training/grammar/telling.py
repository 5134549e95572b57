"""How stories open and close, and the morals of each theme."""

# ruff: noqa: E501  (a sentence is one line)

INTROS = """
Once upon a time, there was a {mood} {k} called {N} who lived {home}.
Once upon a time there was a {mood} {k} named {N}. {He} lived {home}.
Once upon a time, {home}, there lived a {mood} {k} called {N}.
Long ago, a {mood} {k} named {N} lived {home}.
There once was a {mood} {k} called {N}, and {he} lived {home}.
In a land far away lived {N}, a {mood} {k}. {His} home was {home}.
Not so long ago, a {mood} {k} by the name of {N} lived {home}.
Once there was a {k} called {N}. {He} was a {mood} {k} and lived {home}.
This is the story of {N}, a {mood} {k} who lived {home}.
Have you heard of {N}, the {mood} {k}? {He} lived {home}.
A long time ago, there lived a {mood} {k} {home}. {His} name was {N}.
Once upon a time, a {mood} {k} lived {home}. Everyone called {him} {N}.
""".strip().splitlines()

ENDINGS = """
And the {mood} {k} [fell asleep|went to bed] with a smile that night.
And so {N} lived happily {home} for many, many years.
That evening, {N} looked up at the stars and felt [very happy|at home].
And {N} and {F} stayed friends for the rest of their lives.
Then {N} went home, and it was the best day {he} had ever had.
And if you ever come to {p}, you may still hear them laugh.
When {N} was in bed that night, {he} thought of {F} and smiled.
Everyone still talks about {N}, the {mood} {k}, to this day.
And they all lived happily ever after.
The sun went down, and {N} was the happiest {k} in the world.
""".strip().splitlines()

MORAL_LINES = """
And {N} learned that {moral}.
The moral of the story is that {moral}.
From that day on, {N} knew that {moral}.
Since then, {N} has never forgotten that {moral}.
And this story tells us that {moral}.
""".strip().splitlines()

MORALS = {
    "friendship": [
        "good friends help each other", "a true friend never forgets you", "friends are worth more than toys",
        "you are never alone when you have a friend",
    ],
    "helping": [
        "helping others is better than winning", "those who help will make many friends", "even a small helper can do great things",
        "it feels good to help someone",
    ],
    "sharing": [
        "sharing makes everything better", "those who share will never be poor", "a thing is twice as nice when you share it",
        "it is better to share than to have it all",
    ],
    "honesty": [
        "it is best to tell the truth", "the truth makes the heart light", "honest words can mend almost anything",
        "a true friend forgives you when you are honest",
    ],
    "kindness": [
        "a little kindness can change everything", "it is good to be kind to everyone", "kind words cost nothing",
        "being different is a good thing",
    ],
    "courage": [
        "being brave means to be afraid and still go on", "you should not be afraid of what you do not know",
        "courage is inside each of us", "things are often less scary than they seem",
    ],
    "patience": [
        "you can do it if you keep trying", "good things need time", "practice and patience lead to success",
        "it is too early to give up when you have just begun",
    ],
    "teamwork": [
        "together we can do what nobody can do alone", "many hands make light work", "everyone can help in their own way",
        "a team is stronger than any storm",
    ],
}  # fmt: skip

# What the hero's days are like; said in some stories before the plot begins.
HABITS = """
In the morning {he} [washed {his} face in the cold water|ate {breakfast}], and in the evening {he} [counted the stars|read a book].
{His} house was small, but it was [warm and bright|full of books|always clean].
Every day {he} [went for a long walk|sat on a stone and watched the clouds|swept the floor and sang].
{He} loved [{breakfast}|the smell of rain|the sound of the wind] more than anything.
{His} mother always said, "[Be careful|Be good|Wear your scarf], my little {k}."
{He} had [two|three|five|seven] [brothers|sisters], and they all [snored at night|laughed a lot|liked to sing].
The neighbours [liked {him} very much|often came for tea|smiled when they saw {him}].
{His} favourite colour was [red|blue|green|yellow], and {his} favourite food was {breakfast}.
On Sundays {he} always [baked bread|cleaned the windows|visited {his} grandmother].
{He} wore [a green hat|a red scarf|a blue coat|yellow boots], summer and winter.
""".strip().splitlines()
