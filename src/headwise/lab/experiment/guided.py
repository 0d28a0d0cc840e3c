"""Which roles guide the heads of an arm, and which of them are replaced by a control."""

from dataclasses import dataclass

from headwise.errors import DataError, SettingError, require_choice

# In the paper's order, which is that of the heads.
ROLES = ("rare", "separator", "dependency", "major", "window")
# The roles that need a parse.
PARSED = ("dependency", "major")


@dataclass(frozen=True)
class Guided:
    """Heads 0 to N - 1 of every layer get roles (Wang et al. 2021), the others stay free.

    Attributes:
        roles: The roles, one a head.
        drop: Roles replaced by the padding mask; the head stays (figure 2 of the paper).
        random: Roles replaced by a random mask with as many allowed keys in each row, drawn once a sentence and run.
        shuffled: Roles made from another parse: that of another training sentence of as many words.
        released: Whether the roles are those of the paper's released code.

    Raises:
        SettingError: A role is unknown or named twice, a replaced role is none of `roles`, or nothing is left to guide.

    Example:
        >>> Guided(drop=("window",)).parsed
        ('dependency', 'major')
    """

    roles: tuple[str, ...] = ROLES
    drop: tuple[str, ...] = ()
    random: tuple[str, ...] = ()
    shuffled: tuple[str, ...] = ()
    released: bool = False

    def __post_init__(self) -> None:
        for name, known in (("roles", ROLES), ("drop", self.roles), ("random", ROLES), ("shuffled", PARSED)):
            given = getattr(self, name)
            for role in given:
                require_choice(name, role, known)
            if len(set(given)) != len(given):
                raise SettingError(f"{name} is {'/'.join(given)}; name each role once.")
            # all roles, or all of a parse: those of them that there are
            if given and given != known and not set(given) <= set(self.roles):
                raise SettingError(f"{name} is {'/'.join(given)}; expected some of the roles {'/'.join(self.roles)}.")
        replaced = [*self.drop, *self.random, *self.shuffled]
        double = next((role for role in replaced if replaced.count(role) > 1), None)
        if double is not None:
            raise SettingError(f"role {double} is replaced in two ways; choose one of drop, random, shuffled.")
        if not self.roles or set(self.drop) == set(self.roles):
            raise SettingError("no role is left; name at least one, or take the arm plain.")
        if self.shuffled and not set(self.shuffled) & set(self.roles):
            raise SettingError(f"no role of {'/'.join(self.roles)} needs a parse, so none can have another one.")

    @property
    def parsed(self) -> tuple[str, ...]:
        """The roles that need a parse, their own or another sentence's; a random mask needs the role's own."""
        return tuple(role for role in self.roles if role in PARSED and role not in self.drop)


def require_parses(guided: Guided, there: bool) -> None:
    """Raise `DataError` where a role needs a parse and there is none."""
    if guided.parsed and not there:
        raise DataError(
            f"the roles {', '.join(guided.parsed)} need parses; name a spaCy pipeline with a parser, its folder or an "
            "installed package (--pipeline DIR)."
        )
