from drmas.envs.search.cache import LruCache


def test_what_was_asked_for_longest_ago_goes_first():
    cache = LruCache(2)
    cache.put("a", 1)
    cache.put("b", 2)
    assert cache.get("a") == 1
    cache.put("c", 3)
    assert [cache.get(key) for key in "abc"] == [1, None, 3]
    cache.put("a", 4)
    assert (cache.get("a"), len(cache)) == (4, 2)


def test_a_size_of_0_keeps_nothing():
    cache = LruCache(0)
    cache.put("a", 1)
    assert (cache.get("a"), len(cache)) == (None, 0)
