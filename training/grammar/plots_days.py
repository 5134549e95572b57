"""Plots of a day out: snow, fog, stars, small guests and big plans. The notation is that of plots_friends."""

# ruff: noqa: E501  (a beat is one line)

RESCUE_BABY = """
One morning, {N} found a baby bird in front of {his} door. It was cold and all alone. || Under the window, {N} heard a tiny voice. It was a baby bird that had fallen out of its nest.
"Where is my mother?" cheeped the little bird. || The baby bird looked at {N} with big eyes and shivered.
---
@mood
{N} put the bird into {his} {o} and kept it warm. || "Come with me," said {N}, and {he} made a bed for the bird in {his} {o}.
{He} asked {F} the {fk}, but {F} had seen no bird. "Ask {G} the {gk}," {fhe} said. "{gHe} sees everything." || First {he} went to {F} the {fk}. {F} gave the bird some crumbs and said, "{G} the {gk} may know more."
So they went to {G}, who thought for a while. "There is a nest near {p}," {ghe} said. || {G} pointed to {p}. "I saw a bird there, and she was crying," {ghe} said.
---
They hurried to {p}. || The way to {p} was long, but {N} held the {o} very carefully.
And there was the mother! She flew around them and sang with joy. || "My baby!" called a voice from above. It was the mother bird.
"How can I thank you, {N}?" she asked. || She gave {N} her finest feather.
"Sing for us," said {N}, and so she did. || Every morning since then, two birds have been singing at the window of {N}.
?And the {o} still has a small feather in it. || {F} and {G} came to listen, too.
"""

FOG = """
One evening, {N} and {F} the {fk} were playing far from home. || In autumn, {N} went to {p} with {F} the {fk} to gather wood.
Then the fog came. It was so thick that they could not see their own feet. || Suddenly everything was white. There was fog in front of them and fog behind them.
"We are lost," said {F}, and {fhis} voice trembled. || "Which way is home?" asked {F}.
---
@mood
Luckily {N} had {his} {o} with {him}. || "Look, I still have my {o}," said {N}.
"Hold on to one end of it, and I will hold the other," {he} said. "So we will not lose each other." || {He} tied the {o} to a branch, so that they would know if they came to the same place again.
Step by step they went on, and {N} told funny stories, so that {F} would not cry. || They sang a song together, louder and louder.
---
Then they heard someone far away. It was {G} the {gk}! || "Who is singing there?" called a voice. It was old {G} the {gk} with a lamp.
{G} had heard them and showed them the way. || "I know every stone here," said {G}. "Follow me."
Soon they saw the lights of home. || When they reached the door, the moon came out, and the fog was gone.
They drank hot tea and ate {food}, and {F} fell asleep on the sofa. || "With you I am not afraid of any fog," said {F} to {N}.
"""

FALLEN_STAR = """
One night, {N} could not sleep and looked out of the window. || It was a clear night, and {N} was counting the stars.
Suddenly a star fell from the sky, right down to {p}. || One little star grew brighter and brighter. Then it fell down and landed {inp}.
{He} woke up {his} friend {F} the {fk}, and they [ran out together|went to look for it].
---
{inp^} lay the star. It was no bigger than an apple. "I want to go home," it whispered. || The star was sitting {inp} and crying little sparks.
@mood
"How can we get it back up?" asked {F}. || {F} scratched {fhis} head. "The sky is so high," {fhe} said.
First they threw it up in the air, but it came down again. || They climbed the highest tree, but the sky was still far away.
Then {N} thought of {his} {o}. || "Let us take my {o}," said {N}.
---
They put the star on the {o} and asked the wind for help. || They tied the star to the {o} and called the wind.
And the wind blew and blew, and the star flew higher and higher. || The wind lifted the {o} up, over the trees and over the clouds.
"Thank you, {N}! Thank you, {F}!" called the star. || Up in the sky, the star took its old place and twinkled three times.
Each night since then, one star has been shining brighter than all the others. || When {N} and {F} go for a walk at night, that star lights up their way.
"""

SNOW = """
It was a very cold winter. Snow lay on the roofs and on the trees. || One morning, everything was white. It had snowed all night.
{N} had a warm {o} that {his} mother had made. || {His} grandfather had given {him} a thick {o} for the winter.
---
When {he} went outside, {he} saw {F} the {fk}, who was shaking with cold. || Near {p} {he} met {F} the {fk}. {F} had nothing warm to wear.
"Are you not cold?" asked {N}. "A little," said {F}, but {fhis} teeth were chattering. || "I lost everything in the storm," said {F} quietly.
@mood
So {he} took off {his} {o} and gave it to {F}. || "Take my {o}," said {N}. "I can run to keep warm."
{F} put it on and smiled. "It is as warm as the sun," {fhe} said. || {F} did not know what to say. {fHe} just hugged {N}.
---
But at night, {N} began to sneeze. {He} had caught a cold. || The next day, {N} had to stay in bed with a red nose.
{F} heard about it and told {G} the {gk}. || "We must do something for {N}," said {F} to {G} the {gk}.
{G} cooked {food}, and {F} made tea with honey. || They brought a pot of tea and some {food}, and they sat down by the bed.
{F} had made a new {o}, too, just like the first one. || And {G} had made a new {o} for {him}. Now both friends had one.
A week later, {N} was well again, and they all built a snowman {inp}. || When {N} was well again, they all had a big snowball fight {inp}.
"""

CRY_WOLF = """
{N} liked to play tricks. || {N} was often bored, and then {he} thought of silly tricks.
One day {he} ran around and shouted, "Help, help! A {monster} is coming!" || "Help! There is a {monster} {inp}!" {he} cried.
{F} the {fk} and {G} the {gk} came running with sticks. But there was no {monster}, and {N} rolled on the ground with laughter. || Everyone came to help, {F} the {fk} first of all. But {N} only laughed. "It was a joke!" {he} said.
"That was not funny," said {F}. || {F} was angry. "I will not believe you again," {fhe} said.
---
A few days later, {N} was playing with {his} {o} {inp}. || The next week, {N} took {his} {o} and went to {p}.
Suddenly a real {monster} stood there and took the {o}! || Then the ground shook. There was a {monster}, a real one, and it wanted the {o}.
"Help! A {monster}!" called {N}. But nobody came. || {N} shouted for help, but everybody thought that it was a joke.
@mood
Only {F} stopped and listened. "This time it sounds real," {fhe} said, and {fhe} ran to {p}. || At last {F} came after all. {fHe} had heard that the voice of {N} was different.
---
Together they made so much noise that the {monster} dropped the {o} and ran away. || When the {monster} saw that {N} was not alone, it gave the {o} back and went away.
"I am sorry for my tricks," said {N}. "Why did you come?" "Because you are my friend," said {F}. || "I will never trick you again," said {N}, and {he} kept {his} word.
"""

KITE_IN_TREE = """
One windy day, {N} and {F} the {fk} were playing with a {o}. || {N} had a new {o}, and {he} showed it to {F} the {fk}.
The wind took the {o} and blew it into a tall tree near {p}. || Whoosh! The wind carried it away, and it got stuck in the highest tree {inp}.
{N} jumped, but {he} could not reach it. || {F} threw a stick at it, but the {o} did not move.
---
Then {G} the {gk} came by. "I can climb," {ghe} said, but the branch was too high. || They asked {G} the {gk} for help. {G} was tall, but not tall enough.
"It is no use," said {F}. "The {o} is gone." || They all sat down under the tree and felt sad.
@mood
"None of us is tall enough," said {N}. "But what if we stand on top of each other?" || "Wait," said {N}. "Let us make a tower!"
---
So {G} stood at the bottom, {F} climbed on {ghis} back, and {N} climbed to the very top. || {F} stood on {G}, and {N} stood on {F}. The tower swayed from side to side.
A little more, a little more, and {N} had the {o}! || {N} stretched as far as {he} could, and at last {he} touched the {o}.
Then {G} had to sneeze, and they all fell into the soft grass and laughed. || They all cheered and fell down in a heap, but nobody was hurt.
For the rest of the day they played with the {o}, each in turn. || "You are the best team," said {N}, and {he} let {G} hold the {o}.
"""

BAKE = """
{N} wanted to bake the best {food} in the world. || The big fair was coming, and {N} wanted to bring {food}.
But {he} had no flour, no eggs and no honey. || {He} looked into the kitchen. There was nothing left but an old {o}.
---
So {he} went to {F} the {fk}. "I can give you flour," said {F}, "if you help me carry these bags." || {F} the {fk} had flour. "You can have it," {fhe} said, "but first help me with my roof."
{N} helped, and it took all morning. || {N} worked hard and was not angry about it.
Then {he} went to {G} the {gk}. "I will give you eggs and honey for that {o}," said {G}. || {G} the {gk} had honey and eggs, and {ghe} liked the {o} of {N}. So they made a trade.
@mood
At home {he} mixed everything and put it into the oven. Soon the whole house smelled good. || {He} stirred and stirred, until {his} arms hurt. Then {he} waited.
---
The {food} came out golden and warm. || It was perfect. {N} wanted to eat it all at once.
But then {he} thought of {F} and {G}. Without them there would be no {food}. || "I did not make this alone," {he} said.
{He} carried it to {p} and called {F} and {G}. || {He} invited {F} and {G}, and they had a picnic {inp}.
They ate until they could not move. "The secret is the flour," said {F}. "No, the honey," said {G}. || {G} gave the {o} back to {N}. "This was the best trade of my life," {ghe} said.
"The secret is that we did it together," said {N}. || And there was not one crumb left.
"""

BOAT = """
{N} had always dreamed of the island that could be seen from {p}. || Every evening, {N} looked at the far island and wondered who lived there.
"I will build a boat," {he} said. {F} the {fk} laughed. "You cannot even swim!" || {He} told {F} the {fk} about it. "Let us build a boat," said {F}.
They took old boards, a sheet and a {o} for luck. || {He} found some wood {inp}, and {he} put a {o} on top as a flag.
---
When the boat was ready, {N} and {F} sailed away. || On a sunny day, {F} and {N} pushed the boat into the water.
At first the sea was calm. But then big waves came, and the boat turned round and round. || Half way there, water came in through a small hole.
@mood
"Take the cup and throw the water out!" called {N}, and {F} did. || {N} held on to the sail, and {F} steered with all {fhis} strength.
---
At last they felt sand under the boat. They had reached the island! || When the wind stopped, the island was right in front of them.
There lived {G}, a {gk} who had not had a visitor for years. || "Welcome!" called {G}, an old {gk}. "I have waited so long for someone to talk to."
{G} gave them {food} and told them about the stars and the sea. || They ate {food}, and {G} played music for them.
Before they left, {N} gave {G} the {o}. "So that you think of us," {he} said. || "Come back soon," said {G}, and {N} left the {o} there as a promise.
And every summer, they sailed to the island again. || From the shore, they could see the {o} shine in the sun.
"""

DAY_PLOTS = {
    "baby": ("kindness", "nest", RESCUE_BABY),
    "fog": ("courage", "long", FOG),
    "star": ("helping", "light", FALLEN_STAR),
    "snow": ("kindness", "warm", SNOW),
    "wolf": ("honesty", "toy", CRY_WOLF),
    "tree": ("teamwork", "light", KITE_IN_TREE),
    "bake": ("sharing", "toy", BAKE),
    "boat": ("friendship", "toy", BOAT),
}
