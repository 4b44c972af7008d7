"""The plots of the generated stories: a plot is a list of steps, a step a choice of sentences.

Fields in braces are filled by generate.py and stay the same through a story: hero, friend, the pronouns he, him, his
and friend_he, friend_him, friend_his, and the plot's own things. A sentence begins with a capital letter whatever
field it begins with.
"""

Step = tuple[str, ...]
Plot = tuple[Step, ...]

OPENINGS: Step = (
    "{time}, {hero} was {where}.",
    "{time}, {hero} and {friend} met {where}.",
    "{hero} lived close to {place} with {his} {helper}.",
    "There was once a child called {hero}, who liked to sit {where}.",
    "{hero} was {mood} that day, and so {he} went out and stood {where} for a while.",
    "{time}, {hero} walked all the way to {place}.",
)

ENDINGS: Step = (
    "Then they went home, and {helper_name} had {food} ready for them.",
    "{lesson}, said {his} {helper} that night.",
    "That night {hero} slept well.",
    "{hero} never forgot that day.",
    "When the stars came out, {hero} and {friend} were still talking about it.",
    "{hero} told the story to {his} {helper}, who laughed and gave {him} {food}.",
    "And that is why {hero} and {friend} are friends to this day.",
    '"{lesson}," said {friend}, and {hero} thought so too.',
)

LOST: Plot = (
    (
        "{hero} had a {colour} {thing} and took it with {him} everywhere.",
        "In {his} bag was a {colour} {thing}, a gift from {his} {helper}.",
        "{hero} played with a {colour} {thing} until the sun was high.",
        "{hero} was very fond of {his} {colour} {thing}.",
    ),
    (
        "But when {he} wanted to go home, the {thing} was gone.",
        "Then {he} put the {thing} down, and a minute later {he} could not see it any more.",
        "At noon {he} looked into {his} bag, and the {thing} was not there.",
        "Suddenly the {colour} {thing} was nowhere to be seen.",
    ),
    (
        '"Have you seen my {thing}?" {he} asked {friend}. "It is {colour}."',
        '"I have lost my {colour} {thing}," {he} said to {friend}, and {he} almost cried.',
        '{friend} asked, "Why are you so sad?" "Because I cannot find my {colour} {thing}," said {hero}.',
        '"What does it look like?" asked {friend}. "It is {colour} and it is a {thing}," said {hero}.',
    ),
    (
        "They looked {wrong_spot}, but there was only dust.",
        "First they searched {wrong_spot}, and then they asked the {animal}, which said nothing.",
        "{friend} looked {wrong_spot} and {hero} looked everywhere else.",
        "They walked back the same way and looked {wrong_spot}.",
    ),
    (
        "In the end {friend} found the {thing} {spot}.",
        "At last {hero} looked {spot}, and there was the {colour} {thing}.",
        "It was the {animal} that showed them: the {thing} was {spot}.",
        'Then {friend} called, "Here it is! It was {spot}!"',
    ),
    (
        '"Thank you," said {hero}. "Without you I would have gone home without it."',
        "{hero} was so glad that {he} danced.",
        "{hero} held the {thing} tight and did not let go of it again.",
        "From then on {he} kept the {thing} in a safe place.",
    ),
)

SHARED_MEAL: Plot = (
    (
        "{hero} was hungry, because {he} had eaten nothing since the morning.",
        "{his} {helper} had sent {him} out to buy {food}.",
        "{hero} had one coin and wanted to buy {food}.",
        "{hero} could smell {food}, and {his} stomach began to talk.",
    ),
    (
        "The baker put {food} into {his} basket and wished {him} a good day.",
        "{he} bought {food} and {second_food} and started on the way home.",
        'A woman at a table said, "For one coin you can have {food}."',
        "{he} got {food} in a paper bag, still warm.",
    ),
    (
        "On the way {he} met {friend}, who looked pale and thin.",
        "Then {friend} came along the road with an empty basket.",
        "{friend} was sitting on a stone and had nothing to eat.",
        "Not far from there {he} saw {friend}, who was {mood} and very quiet.",
    ),
    (
        '"Are you hungry?" asked {hero}. "Yes," said {friend}, "because our cupboard is empty."',
        '"Take half of it," said {hero}. "I cannot eat it all alone."',
        '{friend} looked at the {food} and asked, "Is that for you alone?" "No," said {hero}, "it is for us."',
        '"Sit down with me," said {hero}, "for everything tastes better when two people eat."',
    ),
    (
        "So they sat down in the shade and ate until nothing was left.",
        "They shared the {food}, and a {size} {animal} got the last piece.",
        "{friend} ate slowly and smiled at every bite.",
        "They ate together, and {friend} told a long story about a {animal}.",
    ),
    (
        "The next day {friend} came back with {second_food} for {hero}.",
        '"Tomorrow I will bring {second_food}," said {friend}, and so it was.',
        "Since that day they have eaten together every week.",
        "{hero} came home with an empty bag and a full heart.",
    ),
)

NIGHT_NOISE: Plot = (
    (
        "That night {he} could not sleep, because there was a strange noise.",
        "When it was dark, {he} heard something that {he} had never heard before.",
        "In the middle of the night a noise woke {him}.",
        "The lamp was out and the house was still, but something made a noise.",
    ),
    (
        "{he} pulled the blanket over {his} head and did not move.",
        "{his} heart beat fast, and {his} hands were cold.",
        '"Is it a ghost?" {he} thought.',
        "{he} held {his} breath and listened.",
    ),
    (
        '"Do you hear that?" {he} asked {friend}. "I do," said {friend}. "Let us go and look."',
        "{he} woke {friend}, and together they lit a candle.",
        '"I am afraid," said {hero}. "So am I," said {friend}, "but two are braver than one."',
        "{friend} had heard it too, and {friend_he} took a lamp from the shelf.",
    ),
    (
        "Step by step they went towards the noise.",
        "They opened the door, slowly, slowly, and looked out.",
        "They walked through the dark on their toes.",
        "The floor was cold, and their shadows were long.",
    ),
    (
        "And what was it? It was {noise_maker}, {noise}.",
        "It was only {noise_maker}, {noise}.",
        "There they saw the cause of it all: {noise_maker} was {noise}.",
        '"Look," said {friend}, "it is {noise_maker}, {noise}!"',
    ),
    (
        "They laughed so loudly that {his} {helper} woke up.",
        "{hero} was not afraid any more, because now {he} knew what it was.",
        '"A thing that you know is never as big as a thing that you fear," said {friend}.',
        "After that the noise was like a song to {him}, and {he} fell asleep.",
    ),
)

BUILDERS: Plot = (
    (
        "{hero} wanted to make a {handmade}, because there was none in the whole village.",
        '"Let us make a {handmade}," said {friend}. "Yes, a big one," said {hero}.',
        "{his} {helper} had once made a {handmade}, and now {hero} wanted to make one too.",
        "For a long time {he} had dreamed of a {handmade} of {his} own.",
    ),
    (
        "They needed {material}, and they found it behind the barn.",
        "{friend} brought {material}, and {hero} brought a hammer and a knife.",
        "{his} {helper} gave them {material} and said that they should be careful.",
        "From {material} one can make many things, if one has time.",
    ),
    (
        "They worked all day, and in the evening the {handmade} was done.",
        "{hero} measured and {friend} cut, and then they changed places.",
        "It took them three days, and on the third day they painted it {colour}.",
        "The first part was easy, the second was hard, and the third was fun.",
    ),
    (
        "But the {handmade} was weak on one side, and it broke.",
        "Then a {size} {animal} ran into it, and it fell to pieces.",
        "When they wanted to try it, it broke with a loud crack.",
        "But they had hurried too much, and so it did not hold.",
    ),
    (
        '"Now we know what was wrong," said {friend}. "We must make it stronger."',
        "{hero} was {mood}, but {friend} said that they should begin again.",
        '"Why did it break?" asked {hero}. "Because we did not tie it well," said {friend}.',
        "They looked at the pieces for a long time, and then {hero} had an idea.",
    ),
    (
        "The second {handmade} was better than the first, and it did not break.",
        "So they made it once more, slowly this time, and it held.",
        "In the end they had a {colour} {handmade}, and everyone came to look at it.",
        "They used more of everything, and at last the {handmade} was strong.",
    ),
)

ANIMAL_IN_NEED: Plot = (
    (
        "There {he} saw a {size} {animal} that could not move.",
        "A {size} {animal} sat by the path and looked at {him}.",
        "{hero} heard a soft cry and found a {size} {animal}.",
        "Something moved, and it was a {size} {animal}.",
    ),
    (
        "One of its legs was caught in a rope.",
        "It was cold and wet, because it had fallen into the water.",
        "It had lost its mother and did not know the way.",
        "It was so hungry that it could hardly stand.",
    ),
    (
        '"Do not be afraid," said {hero}. "I will help you."',
        '{hero} called {friend}. "Come quickly," {he} said, "the {animal} needs us."',
        '"What shall we do?" asked {hero}. "We must be quiet," said {friend}, "or it will run away."',
        "{he} knelt down and held out {his} hand, and the {animal} did not run away.",
    ),
    (
        "{friend} brought {food}, and the {animal} ate a little.",
        "They put the {animal} into a basket and covered it with a {colour} blanket.",
        "{hero} worked with care, and {friend} spoke to the {animal} in a low voice.",
        "They carried it home, where {his} {helper} gave it warm milk.",
    ),
    (
        "After two days the {animal} was well again.",
        "The next morning the {animal} could stand, and then it could walk.",
        "Soon it was strong, and it jumped about the room.",
        "Little by little the {animal} lost its fear.",
    ),
    (
        "Then they took it back to {place} and let it go.",
        "It ran off, but at the edge of the field it turned and looked back.",
        "{hero} wanted to keep it, but {friend} said that a {animal} must be free.",
        "Since then the {animal} has come to the door every evening.",
    ),
)

WEATHER_TRIP: Plot = (
    (
        "{hero} and {friend} wanted to go to {second_place}, because {friend} had never been there.",
        "{hero} and {friend} had a plan: they wanted to walk to {second_place}.",
        '"Today we go to {second_place}," said {hero}. "I have packed {food}."',
        "The way to {second_place} was long, so they started early.",
    ),
    (
        "The sky was clear and the birds were singing.",
        "They sang while they walked, and a {animal} followed them.",
        "{friend} carried the {food} and {hero} carried a {colour} {thing}.",
        "At first everything went well.",
    ),
    (
        "But then {weather_fact}.",
        "They had gone half of the way when {weather_fact}.",
        "Just then {weather_fact}.",
        "After an hour {weather_fact}.",
    ),
    (
        '"We cannot go on," said {friend}. "You are right," said {hero}, "the {weather} is too much for us."',
        '"Shall we turn back?" asked {hero}. "Yes, because of the {weather}," said {friend}.',
        '"I do not like this {weather}," said {friend}, and {friend_he} took {hero} by the hand.',
        '"What a pity," said {hero}, "but nobody can change the {weather}."',
    ),
    (
        "So they ran to a house, and the people there let them in.",
        "So they turned round and were home before supper.",
        "There was a barn not far from the road, and they went inside.",
        "{friend} knew a dry place, and they waited there.",
    ),
    (
        "{weather_plan}, and the day was a good day after all.",
        "{weather_plan}, and they forgot that they had wanted to go to {second_place}.",
        "{weather_plan}. They went to {second_place} another time.",
        "{weather_plan}, and {hero} said that this was even better than {second_place}.",
    ),
)

PRACTICE: Plot = (
    (
        "{hero} could not {skill}, and {he} was ashamed of it.",
        "All the other children could {skill}, but {hero} could not.",
        "{hero} wanted to learn how to {skill}.",
        '"I will never be able to {skill}," said {hero}.',
    ),
    (
        '"It is easy," said {friend}. "I will show you."',
        '"Nobody can {skill} on the first day," said {friend}.',
        '"Can you {skill}?" {he} asked {friend}. "A little," said {friend_he}. "Let us try together."',
        "{friend} could {skill} very well, because {friend_his} {helper} had taught {friend_him}.",
    ),
    (
        "The first time it went wrong, and the second time too.",
        "{he} tried it once, and the {animal} on the wall seemed to laugh.",
        "{he} tried and tried until it was dark.",
        "At first {he} was too fast, and then {he} was too slow.",
    ),
    (
        '"I give up," said {hero}. "Not yet," said {friend}, "you are better than yesterday."',
        "{hero} was {mood}, but the next morning {he} began again.",
        "{his} {helper} saw it and gave {him} {food}, and then {he} went on.",
        '"What do I do wrong?" asked {hero}. "You think too much about it," said {friend}.',
    ),
    (
        "So {he} practised every day, ten minutes in the morning and ten in the evening.",
        "Every day it went a little better.",
        "A week went by, and then another.",
        "{he} did one small part at a time, as {friend} had told {him}.",
    ),
    (
        "And one day {hero} could {skill} as well as anybody.",
        "In the end {he} could do it, and {friend} clapped {friend_his} hands.",
        'Then {he} did it without a fault. "You see," said {friend}, "now you can {skill}!"',
        "Now it is {hero} who shows the small children how to {skill}.",
    ),
)

PLOTS: tuple[Plot, ...] = (LOST, SHARED_MEAL, NIGHT_NOISE, BUILDERS, ANIMAL_IN_NEED, WEATHER_TRIP, PRACTICE)
