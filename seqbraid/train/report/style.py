"""How our pages look, light and dark."""

STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --card: #f4f6f8; --ink: #1b2430; --soft: #5d6b7a;
        --good: #14795b; --bad: #c02f1d; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #12161c; --card: #1c222b; --ink: #e6eaef; --soft: #9aa7b4;
          --good: #4cc79f; --bad: #ff7b66; }
}
body { background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; margin: 0 auto;
       max-width: 960px; padding: 24px; }
h1 { font-size: 26px; margin: 0 0 4px; }
h2 { font-size: 18px; margin: 36px 0 6px; }
p { margin: 6px 0 12px; }
.soft { color: var(--soft); }
.tiles { display: grid; gap: 12px; grid-template-columns: repeat(auto-fit, minmax(165px, 1fr));
         margin: 20px 0; }
.tile { background: var(--card); border-radius: 10px; color: var(--soft); font-size: 13px;
        padding: 12px 16px; }
.tile b { color: var(--ink); display: block; font-size: 25px; line-height: 1.3; }
.good, .tile b.good { color: var(--good); }
.bad, .tile b.bad { color: var(--bad); }
svg { display: block; height: auto; width: 100%; }
.digits { display: flex; flex-wrap: wrap; gap: 12px 24px; }
figure { margin: 0; text-align: center; width: 64px; }
figure svg { background: #ffffff; border: 1px solid #cdd4dc; border-radius: 6px; }
figcaption { font-size: 14px; }
pre { background: var(--card); border-radius: 10px; overflow-x: auto; padding: 12px 16px; }
"""
