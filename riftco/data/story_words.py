"""The words of the generated stories and questions."""

GIRLS = (
    "Anna", "Clara", "Dora", "Ella", "Emma", "Eva", "Fay", "Grace", "Ida", "Iris", "Jane", "Julia", "Lily", "Lucy",
    "Mara", "Mia", "Nell", "Nina", "Olga", "Rosa", "Ruth", "Sara", "Vera", "Zoe",
)  # fmt: skip
BOYS = (
    "Adam", "Ben", "Carl", "Dan", "David", "Emil", "Finn", "Frank", "George", "Hugo", "Ivan", "Jack", "Leo", "Luke",
    "Mark", "Max", "Nick", "Oscar", "Paul", "Peter", "Sam", "Theo", "Tom", "Will",
)  # fmt: skip

# Each place with the word that leads to it: one is in the garden, by the river, on the hill.
PLACES = (
    ("in", "the garden"), ("in", "the forest"), ("in", "the kitchen"), ("in", "the park"), ("in", "the old barn"),
    ("in", "the village"), ("in", "the library"), ("in", "the yard"), ("in", "the field"), ("in", "the small shop"),
    ("by", "the river"), ("by", "the lake"), ("by", "the sea"), ("by", "the mill"), ("by", "the pond"),
    ("by", "the wooden bridge"), ("on", "the hill"), ("on", "the beach"), ("on", "the farm"), ("on", "the market"),
    ("at", "the station"), ("at", "the harbour"), ("at", "school"), ("near", "the castle"), ("near", "the well"),
)  # fmt: skip
HIDING_PLACES = (
    "under the bed", "behind the door", "in the tall grass", "under a bench", "in a wooden box", "behind the clock",
    "between two stones", "under the stairs", "in the apple basket", "behind the curtain", "on the top shelf",
    "under a pile of leaves", "in the pocket of an old coat", "next to the stove", "inside a boot",
)  # fmt: skip

COLOURS = ("red", "blue", "green", "yellow", "white", "black", "brown", "silver", "golden", "purple", "grey", "pink")
THINGS = (
    "ball", "kite", "book", "key", "hat", "ring", "drum", "boat", "lamp", "bell", "cup", "coin", "map", "scarf", "shoe",
    "whistle", "basket", "blanket", "button", "pencil", "mirror", "toy horse", "paper bird", "paper flag",
)  # fmt: skip
HANDMADE = (
    "kite", "bird house", "raft", "bench", "toy boat", "paper lantern", "wooden sword", "basket", "cart", "bridge",
    "swing", "snow house", "flute", "chair for the cat",
)  # fmt: skip
MATERIALS = (
    "old boards",
    "string and paper",
    "thin branches",
    "dry reeds",
    "some rope",
    "a broken box",
    "clay",
    "strong cloth",
)
FOODS = (
    "bread", "soup", "cheese", "apples", "pears", "plums", "honey", "nuts", "cake", "porridge", "berries", "eggs",
    "potatoes", "warm milk", "fresh buns",
)  # fmt: skip
ANIMALS = (
    "cat", "dog", "fox", "hare", "horse", "goat", "sheep", "cow", "mouse", "frog", "hen", "duck", "goose", "pony",
    "hedgehog", "squirrel", "lamb", "donkey",
)  # fmt: skip
SKILLS = (
    "swim", "whistle", "skate", "ride a horse", "row a boat", "read", "climb a rope", "bake bread", "tie a knot",
    "play the drum", "catch a ball", "count to a hundred", "light a fire", "write a letter",
)  # fmt: skip
SIZES = ("small", "big", "tiny", "young", "lame", "thin", "fat", "quick", "slow", "shy")
MOODS = ("happy", "sad", "tired", "calm", "proud", "angry", "curious", "hungry", "lonely", "excited")
HELPERS = ("grandmother", "grandfather", "mother", "father", "aunt", "uncle", "sister", "brother", "cousin")
TIMES = (
    "one morning", "one evening", "one day", "one summer day", "one winter morning", "early on Monday", "on Tuesday",
    "last Sunday", "after school", "after lunch", "before supper", "late in the autumn", "in the first week of spring",
)  # fmt: skip
WEATHERS = ("rain", "snow", "wind", "fog", "thunder", "heat")
WEATHER_FACTS = {
    "rain": "it began to rain and the paths turned to mud",
    "snow": "it began to snow and the road went white",
    "wind": "a strong wind came up and bent the trees",
    "fog": "a thick fog came in and nobody could see the road",
    "thunder": "thunder rolled over the hills and the sky grew dark",
    "heat": "the sun grew so hot that even the stones were warm",
}
WEATHER_PLANS = {
    "rain": "They stayed inside and listened to the drops on the roof",
    "snow": "They put on thick coats and rolled the snow into a big ball",
    "wind": "They closed the windows and told each other stories",
    "fog": "They lit a lamp and waited until the fog was gone",
    "thunder": "They sat close to each other and counted until the next thunder",
    "heat": "They sat in the shade and drank cold water",
}
NOISES = {
    "a branch": "tapping on the window", "an owl": "calling from the barn", "the wind": "singing in the chimney",
    "a mouse": "running along the wall", "the old clock": "ticking in the hall", "the cat": "walking on the roof",
    "the rain": "dripping into a bucket", "a loose door": "moving in the wind",
}  # fmt: skip
LESSONS = (
    "A small help is still a help", "It is good to ask before you guess", "Slow work is often the best work",
    "What you share comes back to you", "A friend makes a long road short", "You cannot know before you try",
    "It is never too late to say sorry", "Whoever looks twice finds more", "Every big thing begins small",
)  # fmt: skip

CATEGORIES = {
    "animal": ("cat", "dog", "fox", "horse", "goat", "mouse", "duck", "owl"),
    "food": ("bread", "soup", "cheese", "honey", "cake", "porridge"),
    "colour": ("red", "blue", "green", "yellow", "white", "black"),
    "thing": ("ball", "kite", "key", "lamp", "bell", "drum"),
}
OPPOSITES = (
    ("big", "small"), ("hot", "cold"), ("up", "down"), ("old", "new"), ("fast", "slow"), ("wet", "dry"),
    ("open", "closed"), ("early", "late"), ("full", "empty"), ("long", "short"), ("high", "low"), ("happy", "sad"),
)  # fmt: skip
