"""Plots about others: sharing, helping, honesty and new friends.

A plot is a theme, the class of the thing in it, and beats. A beat is one line; " || " parts its variants, [a|b] parts a
choice inside it, a leading "?" makes it optional, "---" is a new paragraph, "@mood" is the sentence for the hero's mood.
Slots: {N} {k} {he} hero's name, kind, pronouns; {F} {fk} {fhe} friend's; {G} {gk} another friend's; {o} the thing;
{p} a destination and {inp} the same with its preposition. A name never opens a paragraph or a quotation, so that it is
always written with the same leading space, which makes it easier to copy.
"""

# ruff: noqa: E501  (a beat is one line)

LOST = """
{N} had a {o} that {he} loved very much. || The thing {N} loved most was a {o}. || {N} owned a {o}, and {he} took it everywhere.
?{His} grandmother had given it to {him}. || {He} had found it long ago {inp}. || Every night {he} put it next to {his} bed.
---
One [windy|sunny|cold|rainy] day, the {o} was gone. || But one morning, {N} looked and the {o} was not there. || One day, while {N} was playing {inp}, the {o} got lost.
{He} looked under the bed and behind the door, but {he} could not find it. || {He} searched high and low. "Oh no, where is my {o}?" {he} cried.
@mood
On the way {he} met {F} the {fk}. || Then {F}, a friendly {fk}, came by. || {He} ran to {his} friend {F} the {fk}.
"Why are you so sad?" asked {F}. "I have lost my {o}," said {N}. || "Have you seen my {o}?" asked {N}. {F} shook {fhis} head. "No, but I will help you look," {fhe} said.
---
So they walked to {p} together. || Together they went all the way to {p}. || The two friends looked everywhere, until they came to {p}.
There {F} saw something [shine|move] between the leaves. "Look over there!" {fhe} called. || {inp^}, they heard a small sound. {F} pointed with {fhis} nose.
It was the {o}! A little [bird|mouse] had used it [to make a nest|as a bed]. || There was the {o}, [a bit dirty|covered with leaves], but not broken.
{N} [hugged|thanked] {F} and held the {o} tight. || "Thank you, {F}," said {N}. "I could never have found my {o} alone."
?From then on, {N} let {F} play with the {o} too. || That evening they played with the {o} until the moon came up.
"""

STUCK = """
One [bright|foggy|cool] morning, {N} packed a {o} and went for a walk. || {N} never left home without {his} {o}, even if others laughed about it. || One day {N} found an old {o} and took it along.
{He} walked to {p}, humming a tune. || {He} wanted to see {p}.
---
Suddenly {he} heard a cry. "Help! Help!" || But then someone called, "Please help me!"
It was {F} the {fk}, who had fallen into a deep hole {inp}. || A {fk} called {F} was stuck in the mud {inp}. || {inp^} sat {F} the {fk}, and {fhe} could not get out of a thick thorn bush.
"I have been here since last night," said {F}. "I am so tired." || "I cannot move," said {F} with tears in {fhis} eyes.
@mood
"Do not worry, {F}, I will get you out," said {N}. || "Hold on, {F}," called {N}. "I have an idea!"
---
Then {N} remembered the {o}. || {He} looked at {his} {o} and smiled.
{He} held one end of the {o}, and {F} held the other. || {He} let the {o} down, and {F} took hold of it.
{N} pulled and pulled. [Once, twice, three times.|It was hard work.] At last {F} was free. || With a loud plop, {F} came out.
"You saved me," said {F}. "How can I thank you?" "Just be my friend," said {N}. || {F} jumped for joy and hugged {N}. "That {o} is the best thing in the world," {fhe} said.
Ever since that day, the {k} and the {fk} have been best friends. || They went home together, and {F} carried the {o}. || And from that day on, {N} never went anywhere without the {o}.
"""

SHARE = """
One day {N} got a big basket of {food}. || {N} had made some {food}, and it smelled wonderful.
"This is all mine," {he} said. || {He} could hardly wait to eat it. || {He} found a nice spot {inp} and sat down to eat.
---
Just then, {F} the {fk} came along. || After a while, a thin {fk} named {F} walked by.
"I have not eaten since yesterday," said {F}. || {F} looked at the {food} and {fhis} belly rumbled.
?At first {N} wanted to hide the {food}. || {N} looked at the {food} and then at {F}.
@mood
"Come and sit with me, {F}," {he} said. "There is enough for two." || So {he} broke the {food} into two parts and gave {F} the bigger one.
They ate and [laughed|talked] until the sun went down. || {F} ate every crumb. "That was the best {food} of my life," {fhe} said.
---
Some weeks later, winter came, and {N} had nothing left to eat. || Then, one day, {N} got lost {inp} and had no food at all.
There was a knock, and there stood {F} with a [big pot|full bag]. "You shared your {food} with me," {fhe} said. "Now I share with you." || But {F} had not forgotten. {fHe} brought a warm dinner for {N}. "Do you remember the {food}?" {fhe} asked.
{N} was so [happy|glad] that {he} [danced around the table|had to laugh and cry at once]. || "You are a true friend, {F}," said {N}.
"""

HONEST = """
{His} best friend was {F} the {fk}. || {N} had a good friend, a {fk} named {F}.
{F} had a beautiful {o}. "Please be careful with it," {fhe} always said. || {F} was very proud of {fhis} {o}.
---
One afternoon, {F} went [to the market|to sleep], and {N} took the {o} to play with it. || One day {N} wanted to look at the {o}, just for a moment.
But it slipped and fell down. Crack! The {o} was broken. || But {he} was not careful, and the {o} broke into two pieces.
"Oh no," whispered {N}. Quickly {he} hid the {o} {inp}. || Nobody had seen it. So {N} hid the pieces {inp} and said nothing.
?That night {he} could not sleep. || All day long {his} stomach hurt.
When {F} came back, {fhe} looked everywhere. "Where is my {o}?" {fhe} asked. || {F} searched for the {o} and began to cry.
---
@mood
"It was me, {F}," {he} said at last. "I broke your {o}. I am so sorry." || Then {N} told {F} the truth about the {o}.
{F} was quiet for a long time. Then {fhe} smiled. "I am sad about the {o}, but I am glad that you told me." || "Thank you for telling me the truth," said {F}. "That was not easy."
They took some glue and fixed the {o} together. || Together they went to {p}, got the pieces, and mended the {o}.
Now it had a small crack, but {F} liked it even more. || It looked almost like new, and {N} felt as light as a feather.
"""

NEWCOMER = """
One day a new neighbour moved in. It was {F} the {fk}. || One spring, a {fk} called {F} came to live nearby.
{F} looked different, and nobody wanted to play with {fhim}. || The others whispered about {F}, because {fhe} talked in a strange way.
?{F} sat all alone {inp}. || Each day {F} looked out of the window and sighed.
---
@mood
{N} took {his} {o} and went to see {F}. || So {N} knocked at the door with a {o} in {his} hands. || "I will bring {F} a present," thought {N}, and {he} chose {his} {o}.
"Hello, my name is {N}," {he} said. "This {o} is for you." || "Would you like to play with my {o}?" asked {N}.
{F} could not believe it. "Nobody has ever given me anything," {fhe} said. || A big smile came over the face of {F}.
They played with the {o} all afternoon. || {F} showed {N} a new game, and they laughed so loudly that everyone heard it.
---
Soon the others became curious. {G} the {gk} came first and asked to join. || The next day {G} the {gk} came by. "May I play too?" {ghe} asked.
Before long, everybody was playing together {inp}. || By the end of the week, all the neighbours were friends of {F}.
"You were the first to say hello," said {F} to {N}. "I will never forget it." || And the {o}? It hung over the door of {F}, for all to see.
"""

PARTY = """
It was the birthday of {N}. || Tomorrow was a big day, because it was the birthday of {N}.
But nobody said a word about it. || {He} waited for a card or a song, but none came.
First {he} went to see {F} the {fk}. "I have no time today," said {F}, and {fhe} shut the door. || {F} the {fk} ran past with a {o} and did not even stop.
Then {he} asked {G} the {gk}, but {ghe} was busy as well. || Even {G} the {gk} only said, "Not now, {N}."
---
{N} walked slowly to {p} and sat down. || With a heavy heart, {N} went to {p}. "They all forgot me," {he} thought.
@mood
When it grew dark, {he} went home. All the lights were out. || In the evening {he} opened {his} door. It was very quiet.
---
"Surprise!" Everyone jumped out. || Suddenly a hundred candles were lit. "Happy birthday!" called all {his} friends.
There was {F} with a huge cake of {food}, and {G} had brought [balloons|flowers]. || {G} had painted a sign, and {F} had made {food}.
"We had to keep it a secret," said {F}. "And this is for you." It was a {o}! || Then {F} gave {him} a {o}. "We made it ourselves," {fhe} said.
They danced and ate {food} until midnight. || {N} laughed and laughed. It was the best birthday ever.
"""

QUARREL = """
{N} and {F} the {fk} did everything together. || Every day {N} played with {his} friend {F} the {fk}.
But one day they found a {o} {inp}. || One morning they both saw a {o} that lay {inp}.
"I saw it first," said {N}. "No, it is mine," said {F}. || Both of them wanted it. {N} pulled on one side, and {F} pulled on the other.
They shouted and stamped their feet. || They became so angry that they did not speak for three days.
---
{N} sat at home and felt [bad|empty]. Without {F}, nothing was fun. || But playing alone was boring. {N} missed {F} more and more.
?"A {o} cannot laugh with me," {he} thought. || "What good is a {o} without a friend?" {he} asked {himself}.
@mood
So {he} went to {F}. "I am sorry," {he} said. "You can have the {o}." || {He} took the {o} and put it in front of the door of {F}.
"I am sorry too," said {F}. "I do not want the {o}. I want my friend back." || {F} came out with tears in {fhis} eyes and hugged {him}.
---
They thought of a plan. {N} had the {o} on one day, and {F} on the next. And they never fought about it again. || In the end they gave the {o} to little {G} the {gk}, who had no toys at all. {G} was so happy that {ghe} jumped up and down.
"""

FRIEND_PLOTS = {
    "lost": ("friendship", "toy", LOST),
    "stuck": ("helping", "long", STUCK),
    "share": ("sharing", "", SHARE),
    "honest": ("honesty", "toy", HONEST),
    "newcomer": ("kindness", "toy", NEWCOMER),
    "party": ("friendship", "toy", PARTY),
    "quarrel": ("sharing", "toy", QUARREL),
}
