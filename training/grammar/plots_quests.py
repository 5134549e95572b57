"""Plots about the hero: courage, practice, teamwork and discoveries. The notation is that of plots_friends."""

# ruff: noqa: E501  (a beat is one line)

FEAR = """
But {N} had one secret. {He} was afraid of {fear}. || There was only one thing {N} did not like, and that was {fear}.
Whenever {fear_event}, {he} hid [under the table|behind a tree|in a corner] and closed {his} eyes. || Whenever {fear_event}, {he} ran home.
{His} friend {F} the {fk} noticed it. || Only {F} the {fk} knew about it.
---
One evening, {F} said, "Let us try it together. You can hold my {o}. It always gives me courage." || "I was afraid of {fear} once," said {F}. "Take my {o}. It helped me." || {F} gave {him} a {o}. "Hold it tight when you are scared," {fhe} said.
A few days later, {fear_event} again. || Soon the moment came, and {fear_event}.
{N} held the {o} and {his} heart beat fast. || {His} legs shook, but {he} pressed the {o} to {his} chest.
@mood
{He} opened one eye, and then the other, and {fear_good}. || "One, two, three," {he} counted, and looked. And what a surprise: {fear_good}.
---
"I did it!" called {N}. "I am not afraid of {fear} any more!" || "It is not so bad at all," said {N}, and {F} clapped {fhis} hands.
{He} wanted to give the {o} back, but {F} laughed. "It is only a {o}," {fhe} said. "The courage was yours." || Later {N} gave the {o} to {G} the {gk}, who was afraid of {fear} too.
?That night {N} slept better than ever before. || Now {he} even helped others who were afraid.
"""

PRACTICE = """
More than anything, {N} wanted to learn to {skill}. || {N} had a dream. {He} wanted to {skill} better than anyone.
"A {k} cannot {skill}," said {G} the {gk} and laughed. || {He} tried it once and fell flat on {his} nose, and {G} the {gk} laughed.
?All the others could do it already. || {He} was so upset that {he} kicked a stone.
---
@mood
{He} went to {F} the {fk}, who was the best teacher around. "Please teach me," {he} said. || Then {he} met {F} the {fk}. "I was bad at {skilling} too," said {F}. "The secret is to try every day."
So {N} practised {inp} every morning. || Day after day they met {inp} and worked on {skill_thing}.
The first week was [hard|terrible]. The second week was a little better. || {He} made mistakes, and more mistakes, but each day there were fewer of them.
{F} never laughed. "Again," {fhe} said, and {N} tried again. || When {he} wanted to give up, {F} gave {him} some {food} and said, "One more time."
---
At last came the day of the big show. || In summer there was a festival, and everyone came to watch.
{N} was trembling, but {he} thought of {F} and began. || {He} looked at {F}, who nodded, and {he} started {skilling}.
It was wonderful! Nobody had ever seen a {k} {skill} like that. || Everything went well, and the whole crowd cheered.
Even {G} clapped. "I was wrong," {ghe} said. "Can you teach me to {skill}?" || "How did you do that?" asked {G}. "I practised," said {N} with a smile.
"""

RACE = """
Every year there was a great race to {p}. || "Tomorrow is the big race to {p}," said {G} the {gk}.
The winner would get a {o}. || The prize was a beautiful {o}, and {N} wanted it very much.
{N} trained for weeks. So did {F} the {fk}. || {F} the {fk} was sure to win. "Nobody can beat me," {fhe} said.
---
Ready, steady, go! They all ran off. || When the whistle blew, everyone started to run.
Soon {N} was in front, and {he} could already see {p}. || {N} and {F} were side by side, far ahead of all the others.
But then {F} tripped over a root and fell. "Ouch, my leg!" {fhe} cried. || Suddenly there was a cry. {F} had fallen and could not get up.
?The finish was so near. {N} thought of the {o}. || The others just ran past.
@mood
{He} turned around and ran back to {F}. "Lean on me," {he} said. || {N} stopped and helped {F} up. "The {o} can wait," {he} said.
---
Slowly they walked to {p}, arm in arm. They were the very last. || They came in last, but all the people cheered for them.
The winner was {G}. But {ghe} looked at the {o} and shook {ghis} head. "This belongs to {N}," {ghe} said. || {G} had won. {gHe} took the {o} and gave it to {N}. "You are the real winner," {ghe} said.
{N} [smiled|blushed] and shared the {o} with {F}. || And {F} said, "Next year, I will run with you and not against you."
"""

MONSTER = """
Near {p} lived a {monster}, so they said. || Everyone was afraid of {p}, because a {monster} lived there.
Nobody had ever seen it, but at night they heard strange sounds. || "Never go to {p}," the mothers told their children.
---
One day, the {o} of {N} [got lost|was carried away by the wind], right to {p}. || One day, {N} dropped {his} {o}, and it rolled all the way to {p}.
"I have to go there and get it," said {N}. || The others shook their heads, but {N} had to go.
@mood
{inp^}, it was very quiet. Then came a deep voice. "Who is there?" || Step by step {he} walked on, until {he} heard a loud noise. It was the {monster}!
"I am {N} the {k}," {he} said. "Please do not eat me." || "My name is {N}. Are you going to eat me?" {he} asked, and {his} voice shook only a little.
---
But the {monster} was crying. "Everyone runs away from me," it said. "I only want a friend." || "Eat you?" said the {monster}. "I only eat {food}. Would you like some?"
There was the {o}, clean and safe. "I kept it for you," said the {monster}. || The {monster} had found the {o} and gave it back with a shy smile.
So they sat down and ate {food} together. || {N} stayed until evening, and they told each other stories.
The next day {N} brought {F} the {fk} and {G} the {gk} along. Soon the {monster} had many friends. || When {N} told the others about it, they were ashamed. They baked a cake for the {monster} and said sorry.
?And at night, when they heard the strange sounds, they knew that the {monster} was singing. || Since then, {p} has been the best place to play.
"""

TREASURE = """
One day {N} found {tra} {inp}. || While {he} was digging in the garden, {N} found {tra}. || One morning, {tra} lay in front of the door of {N}.
It was warm and it glowed [in the dark|like the moon]. || There were strange signs on the {tr}. || The {tr} seemed to hum a soft tune.
"What can this be?" {he} wondered. || {He} showed the {tr} to {F} the {fk}. "It must be magic," said {F}.
---
At night, the {tr} began to shine, and a light pointed to {p}. || That night {N} had a dream. In the dream, a voice said, "Bring the {tr} to {p}."
So {N} and {F} set out for {p} with some {food} in a bag. || The next day {N} asked {F} the {fk} to come along to {p}.
It was a long way. They crossed a river and climbed over stones. || They walked all day long. When they were tired, they ate the {food}.
@mood
{inp^}, they met {G}, an old {gk} with a white beard. "I lost that {tr} a hundred years ago," {ghe} said. || At last they were there. An old {gk} named {G} was waiting. "You have found my {tr}," {ghe} said.
---
"You could have kept it," said {G}. "But you brought it back. You may make one wish." || {G} was so happy that {ghe} gave them a wish.
{N} thought about gold and toys. Then {he} looked at {F}. "I wish that we stay friends forever," {he} said. || "I wish that nobody in our land has to be hungry," said {N}.
{G} smiled and touched the {tr}, and thousands of lights flew up into the sky. || The {tr} grew bright, and it was done.
They walked home under the stars, and {F} said, "That was a good wish." || And whenever {N} saw a star, {he} thought of the {tr}.
"""

STORM = """
One night a terrible storm came. || In autumn the wind grew stronger and stronger, until it was a storm.
It broke the roof of the house where {F} the {fk} lived. || In the morning, the home of {F} the {fk} was gone. Only {fhis} {o} was left.
{F} sat in the rain and held {fhis} {o}. "Where shall I live now?" {fhe} asked.
---
@mood
"You can stay with me, {F}," said {N}. "And tomorrow we will build a new house." || {N} put a blanket around {F}. "We will build it again," {he} said.
But the wood was too heavy for one {k}. || {N} carried stones all day, but it was too much for one.
So {he} went to {G} the {gk} and asked for help. {G} called all the neighbours. || "Let us ask {G} the {gk}," said {N}. And {G} came at once, with a saw and a hammer.
---
The strong ones carried wood from {p}. The small ones brought leaves and moss. || Some worked on the walls, some on the roof, and {G} cooked {food} for all.
{N} sang a song, and the work was easy. || Nobody could have done it alone, but together it was fun.
After [three|five|seven] days, the new house was ready. || When the moon was full, the house was done, and it was stronger than before.
{F} hung the {o} over the door. "This is the finest house in the world," {fhe} said. || "My house is your house," said {F}, and {fhe} gave the {o} to {N} as a present.
They all ate {food} and danced until late. || When the next storm came, they sat inside together and were not afraid at all.
"""

GARDEN = """
In spring, {N} got a tiny seed from {F} the {fk}. || One day {F} the {fk} gave {N} a small brown seed. "Take good care of it," {fhe} said.
{He} put the seed into the ground {inp} and gave it some water. || {N} planted it {inp}, where the sun was warm.
The next day {he} looked, but there was nothing. || "Grow, little seed," {he} said every morning. But nothing happened.
---
{G} the {gk} came by and laughed. "Nothing will ever grow there," {ghe} said. || "You are watering mud," said {G} the {gk}, laughing.
@mood
Each day {he} carried water from the river and pulled out the weeds. || {N} watered the seed, and {he} even put {his} {o} next to it, so that it was not alone.
It rained and it was hot. Days went by, and weeks. || {F} came to see {him}. "Good things need time," {fhe} said.
---
Then, one morning, there was a little green leaf! || At last a tiny green tip came out of the ground. {N} jumped for joy.
It grew and grew, until it was [as high as a house|taller than {G}]. || In summer it had become a big bush full of sweet berries.
Everyone came to see it. {N} gave berries to all, even to {G}. || "I am sorry that I laughed," said {G}, and {N} gave {ghim} the biggest flower.
And in the autumn, {N} gave one new seed to {F}, and one to {G}. || They sat in its shade, {N}, {F} and {G}, and ate {food}.
"""

QUEST_PLOTS = {
    "fear": ("courage", "toy", FEAR),
    "practice": ("patience", "", PRACTICE),
    "race": ("helping", "toy", RACE),
    "monster": ("courage", "toy", MONSTER),
    "treasure": ("kindness", "", TREASURE),
    "storm": ("teamwork", "toy", STORM),
    "garden": ("patience", "toy", GARDEN),
}
