-- The text in ![text](picture) describes the picture to those who don't see it, as in JupyterLab and on GitHub.
-- Quarto would print it below the picture. A caption that is meant as one comes with `fig-alt` beside it.
function Image(img)
  if #img.caption > 0 and not img.attributes["fig-alt"] then
    img.attributes["fig-alt"] = pandoc.utils.stringify(img.caption)
    img.caption = {}
    return img
  end
end
