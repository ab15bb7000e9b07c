"""The number of threads of a loop, which follows how many cores are free.

Threads that share a nest wait for the last of them. Where another process holds a core, this is a
thread that has to wait for its turn, and all iterations of a small system wait with it: with two
threads on a core and a half they take two to eight times as long as with one. So a loop times some
iterations with all threads, and some with one, and goes on with the faster number. It tries again
after 16 times as long as the trial took, and after twice as long whenever all threads win again, or
when iterations by all threads begin to take much longer. The numbers do not depend on it, to the
last bit.
"""


def pragma(threads: int, team: str = "team") -> list[str]:
    """Print the line by which several threads of a team share the loop that follows."""
    count = f"num_threads({team}.threads) if ({team}.threads > 1)"
    return [f"#pragma omp parallel for schedule(static) {count}"] if threads > 1 else []


def declaration(threads: int) -> str:
    """Declare the team of a loop of so many threads at most."""
    return f"""
extern "C" double omp_get_wtime() noexcept;
namespace {{
struct Team {{
  enum Phase {{ ALL, ONE, DECIDED }};
  static constexpr int MOST = {threads}, TRIAL = 5;
  static constexpr double REST = 16, LONGEST = 256, SLOWER = 1.5;
  int threads = MOST, count = 0;
  Phase phase = ALL;
  double begun = 0, all = 0, one = 0, total = 0, spent = 0, recent = 0, rest = REST, until = 0;
  // Called after each iteration; the first of a trial, in which threads wake up, does not count.
  void iterated() {{
    const double now = omp_get_wtime(), took = now - begun;
    begun = now;
    if (phase == DECIDED) {{
      recent += (took - recent) / 16;
      const bool slower = threads > 1 && recent > SLOWER * all;
      if (now < until && !slower) return;
      if (slower) rest = REST;
      if (threads == 1) one = recent;
      begin(ALL, MOST);
      return;
    }}
    if (count++ > 0) total += took;
    // A trial ends early once it has taken as long as the other one.
    const double other = phase == ALL ? one : all;
    const bool lost = count > 1 && other > 0 && total > (TRIAL - 1) * other;
    if (count < TRIAL && !lost) return;
    spent += TRIAL * total / (TRIAL - 1);
    if (phase == ALL && count == TRIAL) {{
      all = total / (TRIAL - 1);
      begin(ONE, 1);
      return;
    }}
    bool alone = phase == ALL;
    if (phase == ONE) {{
      one = total / (count - 1);
      alone = one < all;
    }}
    rest = alone ? REST : rest < LONGEST ? 2 * rest : rest;
    until = now + rest * spent;
    recent = alone ? one : all, spent = 0;
    begin(DECIDED, alone ? 1 : MOST);
  }}
  void begin(Phase next, int number) {{ phase = next, threads = number, count = 0, total = 0; }}
}};
thread_local Team team;
}}"""
